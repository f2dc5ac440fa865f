"""The weight table: for every Megatron parameter, the Hugging Face tensors it is made of and how
they interleave.

One table serves import, export and resharding. ``{layer}`` stands for the layer's number: global in
Hugging Face names, local to the pipeline stage in Megatron's. ``{expert}`` stands for an expert's
in the same way: each is a row of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from megatron_dcpo.weights.architecture import Architecture

Interleaving = Literal[
    "replicated",  # every tensor-parallel rank holds the whole tensor
    "column",  # output rows are split over tensor-parallel ranks (dim 0)
    "row",  # input columns are split (dim 1)
    "qkv",  # per query group: its query heads, then its key head, then its value head (dim 0)
    # per rank: its rows of the gate projection, then its rows of the up projection (dim 0)
    "gate_up",
    "vocab",  # vocabulary rows, padded at the end to a multiple that divides (dim 0)
]
EngineCut = Literal["whole", "rows", "columns", "heads", "vocabulary"]
# How a tensor-parallel engine cuts the Hugging Face tensors of a row, in their order. ``heads``:
# rows, whole heads of which are repeated where there are more ranks; ``vocabulary``: rows, after
# the engine's own padding.
_ENGINE_CUTS: dict[Interleaving, tuple[EngineCut, ...]] = {
    "replicated": ("whole",),
    "column": ("rows",),
    "row": ("columns",),
    "qkv": ("rows", "heads", "heads"),
    "gate_up": ("rows", "rows"),
    "vocab": ("vocabulary",),
}


@dataclass(frozen=True)
class Row:
    """``megatron``: parameter name in the local layer spec. ``hf``: its tensors, in interleaving
    order.
    """

    megatron: str
    hf: tuple[str, ...]
    interleaving: Interleaving

    @property
    def of_expert(self) -> bool:
        return "{expert}" in self.megatron

    def at(self, layer: int, expert: int, hf_layer: int, hf_expert: int) -> Row:
        """Return the row of one layer and one expert, numbered as on this rank and as in the whole
        model.
        """
        names = tuple(name.format(layer=hf_layer, expert=hf_expert) for name in self.hf)
        return Row(
            megatron=self.megatron.format(layer=layer, expert=expert),
            hf=names,
            interleaving=self.interleaving,
        )

    @property
    def engine_cuts(self) -> tuple[EngineCut, ...]:
        """Return how an engine cuts each of ``hf``."""
        return _ENGINE_CUTS[self.interleaving]


# Transformer Engine's fused linears hold the norm before them, and its grouped ones all experts; no
# experts' linear has the norm. Everything else is named alike in both layer specs.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_GROUPED_EXPERTS = {
    f"mlp.experts.local_experts.{{expert}}.linear_fc{n}.weight": f"mlp.experts.linear_fc{n}.weight{{expert}}"
    for n in (1, 2)
}
LOCAL_NAMES = {fused: local for local, fused in _FUSED_NORMS.items()}

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
_EMBEDDING = "model.embed_tokens.weight"


def transformer_engine_row(arch: Architecture, row: Row) -> Row:
    """Return a layer's row under the name it has in Transformer Engine's layer spec."""
    names = _FUSED_NORMS | _GROUPED_EXPERTS
    if arch.num_experts:
        del names["pre_mlp_layernorm.weight"]
    name = row.megatron.removeprefix(_M)
    return replace(row, megatron=row.megatron.removesuffix(name) + names.get(name, name))


def experts_of(arch: Architecture, row: Row) -> range:
    """Return the experts that have such a row; one row where it is not an expert's."""
    return range(arch.num_experts if row.of_expert else 1)


def expert_places(name: str, shape: Sequence[int]) -> dict[str, tuple[int, int, int]]:
    """Return, of a tensor with all experts of a layer, as transformers holds them in memory:
    (expert, first row, number of rows) of each expert's own tensors. ``experts.gate_up_proj`` is
    [E, 2I, H], ``experts.down_proj`` [E, H, I]; empty for others.
    """
    module, _, last = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    if not parts or not module.endswith(".experts") or len(shape) != 3 or shape[1] % len(parts):
        return {}
    rows = shape[1] // len(parts)
    places = itertools.product(range(shape[0]), enumerate(parts))
    return {
        f"{module}.{expert}.{part}.weight": (expert, half * rows, rows)
        for expert, (half, part) in places
    }


def _mlp_rows(module: str, hf: str) -> list[Row]:
    return [
        Row(
            megatron=f"{_M}{module}.linear_fc1.weight",
            hf=(f"{_H}{hf}.gate_proj.weight", f"{_H}{hf}.up_proj.weight"),
            interleaving="gate_up",
        ),
        Row(
            megatron=f"{_M}{module}.linear_fc2.weight",
            hf=(f"{_H}{hf}.down_proj.weight",),
            interleaving="row",
        ),
    ]


@functools.lru_cache(maxsize=64)
def layer_rows(arch: Architecture) -> tuple[Row, ...]:
    """Return the rows of one decoder layer (Llama's names, which Qwen2 and Qwen3 share)."""
    qkv = tuple(f"{_H}self_attn.{p}_proj" for p in "qkv")
    rows = [
        Row(
            megatron=f"{_M}input_layernorm.weight",
            hf=(f"{_H}input_layernorm.weight",),
            interleaving="replicated",
        ),
        Row(
            megatron=f"{_M}self_attention.linear_qkv.weight",
            hf=tuple(f"{name}.weight" for name in qkv),
            interleaving="qkv",
        ),
        Row(
            megatron=f"{_M}self_attention.linear_proj.weight",
            hf=(f"{_H}self_attn.o_proj.weight",),
            interleaving="row",
        ),
        Row(
            megatron=f"{_M}pre_mlp_layernorm.weight",
            hf=(f"{_H}post_attention_layernorm.weight",),
            interleaving="replicated",
        ),
    ]
    if arch.num_experts:
        rows.append(
            Row(
                megatron=f"{_M}mlp.router.weight",
                hf=(f"{_H}mlp.gate.weight",),
                interleaving="replicated",
            )
        )
        rows += _mlp_rows("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}")
    else:
        rows += _mlp_rows("mlp", "mlp")
    if arch.qkv_bias:
        rows.append(
            Row(
                megatron=f"{_M}self_attention.linear_qkv.bias",
                hf=tuple(f"{name}.bias" for name in qkv),
                interleaving="qkv",
            )
        )
    if arch.qk_layernorm:
        rows.append(
            Row(
                megatron=f"{_M}self_attention.q_layernorm.weight",
                hf=(f"{_H}self_attn.q_norm.weight",),
                interleaving="replicated",
            )
        )
        rows.append(
            Row(
                megatron=f"{_M}self_attention.k_layernorm.weight",
                hf=(f"{_H}self_attn.k_norm.weight",),
                interleaving="replicated",
            )
        )
    return tuple(rows)


EMBEDDING_ROW = Row(
    megatron="embedding.word_embeddings.weight",
    hf=(_EMBEDDING,),
    interleaving="vocab",
)
FINAL_NORM_ROW = Row(
    megatron="decoder.final_layernorm.weight",
    hf=("model.norm.weight",),
    interleaving="replicated",
)


def output_row(arch: Architecture) -> Row:
    """Return the output layer: its own tensor, or (tied) a copy of the embedding on the last
    pipeline stage.
    """
    return Row(
        megatron="output_layer.weight",
        hf=(_EMBEDDING if arch.tied_embeddings else "lm_head.weight",),
        interleaving="vocab",
    )


@functools.lru_cache(maxsize=64)
def hf_shapes(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return every Hugging Face tensor of the architecture with its shape, in checkpoint order.
    Made once: plans ask per tensor.
    """
    h = arch.hidden_size
    f = arch.ffn_hidden_size
    d = arch.kv_channels
    q = arch.num_attention_heads * d
    kv = arch.num_query_groups * d
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (arch.vocab_size, h)}
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
    }
    if arch.num_experts:
        per_layer["mlp.gate.weight"] = (arch.num_experts, h)
    for mlp in [f"mlp.experts.{expert}" for expert in range(arch.num_experts)] or ["mlp"]:
        per_layer |= {
            f"{mlp}.{p}_proj.weight": shape
            for p, shape in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f)))
        }
    if arch.qkv_bias:
        per_layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if arch.qk_layernorm:
        per_layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    for layer in range(arch.num_layers):
        shapes |= {_H.format(layer=layer) + name: shape for name, shape in per_layer.items()}
    shapes["model.norm.weight"] = (h,)
    if not arch.tied_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, h)
    return MappingProxyType(shapes)


@functools.lru_cache(maxsize=64)
def engine_cuts(arch: Architecture) -> Mapping[str, EngineCut]:
    """Return how a tensor-parallel engine cuts each Hugging Face tensor of the architecture."""
    rows = [EMBEDDING_ROW, FINAL_NORM_ROW, output_row(arch)]
    cuts = {name: cut for row in rows for name, cut in zip(row.hf, row.engine_cuts, strict=True)}
    for row in layer_rows(arch):
        for layer, expert in itertools.product(range(arch.num_layers), experts_of(arch, row)):
            cuts |= zip(row.at(0, 0, layer, expert).hf, row.engine_cuts, strict=True)
    return MappingProxyType(cuts)


@functools.lru_cache(maxsize=64)
def adapted(arch: Architecture, projections: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tensors to which a low-rank adapter on ``projections`` (``q_proj``, ...) adds."""
    endings = tuple(f".{projection}.weight" for projection in projections)
    return tuple(name for name in hf_shapes(arch) if name.endswith(endings))


def number_of_parameters(arch: Architecture) -> int:
    """Return the number of parameters of the whole model: tied embeddings once, no padding."""
    return sum(math.prod(shape) for shape in hf_shapes(arch).values())


def kv_bytes_per_token(
    arch: Architecture, itemsize: int, tensor_model_parallel_size: int = 1
) -> int:
    """Return the bytes of keys and values of one token in all layers on one engine rank (heads are
    repeated when there are too few).
    """
    groups = -(-arch.num_query_groups // tensor_model_parallel_size)
    return 2 * arch.num_layers * groups * arch.kv_channels * itemsize
