"""The weight table: the Hugging Face tensors that make up each Megatron parameter, and how they
interleave.

One table serves import, export and resharding. ``{layer}`` stands for a layer's number, which is
global in Hugging Face names and local to the pipeline stage in Megatron's. In the same way,
``{expert}`` stands for an expert's number; each expert has a row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

from megatron_dcpo.architectures.architecture import Architecture

Interleaving = Literal[
    "replicated",  # every tensor-parallel rank holds the whole tensor
    "column",  # output rows are split over tensor-parallel ranks (dim 0)
    "row",  # input columns are split (dim 1)
    # the weight of a norm over all heads: each rank has its heads' (dim 0), an engine the whole
    "norm_of_heads",
    "qkv",  # per query group: its query heads, then its key head, then its value head (dim 0)
    # per rank: its rows of the gate projection, then its rows of the up projection (dim 0)
    "gate_up",
    "vocab",  # vocabulary rows, padded at the end to a multiple that divides (dim 0)
]
EngineCut = Literal["whole", "rows", "columns", "heads", "vocabulary"]
# How a tensor-parallel engine cuts the Hugging Face tensors of a row, in their order. ``heads`` are
# rows of whole heads, which are repeated if there are more ranks; ``vocabulary`` are rows after the
# engine's padding.
_ENGINE_CUTS: dict[Interleaving, tuple[EngineCut, ...]] = {
    "replicated": ("whole",),
    "column": ("rows",),
    "row": ("columns",),
    "norm_of_heads": ("whole",),
    "qkv": ("rows", "heads", "heads"),
    "gate_up": ("rows", "rows"),
    "vocab": ("vocabulary",),
}


@dataclass(frozen=True)
class Row:
    """The name of a Megatron parameter in the local layer spec, and its Hugging Face tensors in
    interleaving order.
    """

    megatron: str
    hf: tuple[str, ...]
    interleaving: Interleaving

    @property
    def is_expert(self) -> bool:
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


@dataclass(frozen=True)
class StoredPart:
    """The table's tensor ``name`` is rows ``first : first + rows`` of a tensor that holds several;
    of one with a first dimension for experts, rows of ``expert``.
    """

    name: str
    first: int
    rows: int
    expert: int | None = None

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape, given that of the tensor that holds it."""
        columns = whole[1:] if self.expert is None else whole[2:]
        return (self.rows, *columns)

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, a view."""
        if self.expert is not None:
            whole = whole[self.expert]
        return whole[self.first : self.first + self.rows]


# Transformer Engine's fused linear layers include the norm before them, and its grouped linear
# layers hold all experts, without the norm. Both layer specs agree on all other names.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LOCAL_EXPERT = "mlp.experts.local_experts.{expert}."
_GROUPED_EXPERTS = {
    _LOCAL_EXPERT + "linear_fc1.weight": "mlp.experts.linear_fc1.weight{expert}",
    _LOCAL_EXPERT + "linear_fc2.weight": "mlp.experts.linear_fc2.weight{expert}",
}
LOCAL_NAMES = {fused: local for local, fused in _FUSED_NORMS.items()}
# The norms of outputs under the names that Megatron Bridge gives them in checkpoints. Here they are
# no part of the linear layers, so that an adapter adds to what is normed.
OUTPUT_NORMS = {
    "self_attn_bda.norm.": "self_attention.linear_proj.post_layernorm.",
    "mlp_bda.norm.": "mlp.linear_fc2.post_layernorm.",
}
# What a router adds to the scores by which it chooses. It is no parameter: it is fp32 whatever the
# type of the weights, and has no gradient.
_CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
ROUTER_BIAS = "mlp.router.expert_bias"
# What ``fused_projections`` hold, from the first row to the last.
_FUSED_PROJECTIONS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def transformer_engine_row(arch: Architecture, layer: int, row: Row) -> Row:
    """Return a row of ``layer``, counted from 0, under the name it has in Transformer Engine's
    layer spec.
    """
    names = _FUSED_NORMS | _GROUPED_EXPERTS
    if arch.has_experts(layer):
        del names["pre_mlp_layernorm.weight"]
    name = row.megatron.removeprefix(_M)
    return replace(row, megatron=row.megatron.removesuffix(name) + names.get(name, name))


def is_of_experts(megatron: str) -> bool:
    """Return whether a Megatron parameter is of experts, which the expert-parallel ranks divide. A
    shared expert is none of them.
    """
    return ".experts." in megatron


def experts_of(arch: Architecture, row: Row) -> range:
    """Return the experts that have such a row; a single 0 if it is not an expert's row."""
    if row.is_expert:
        return range(arch.num_experts)
    return range(1)


def parts_of(name: str, shape: Sequence[int], arch: Architecture | None) -> tuple[StoredPart, ...]:
    """Return the table's tensors in a tensor that holds several, on disk or in the memory of
    transformers; nothing for other tensors. Without ``arch`` only experts are found.
    """
    if arch is not None and name in fused_parts(arch):
        return fused_parts(arch)[name]
    return _experts_in(name, shape)


def _experts_in(name: str, shape: Sequence[int]) -> tuple[StoredPart, ...]:
    """Return the tensors of the experts in a tensor that holds all experts of a layer:
    ``experts.gate_up_proj`` is [E, 2I, H], ``experts.down_proj`` [E, H, I].
    """
    module, _, last = name.rpartition(".")
    projections: tuple[str, ...]
    if last == "gate_up_proj":
        projections = ("gate_proj", "up_proj")
    elif last == "down_proj":
        projections = ("down_proj",)
    else:
        return ()
    if not module.endswith(".experts") or len(shape) != 3 or shape[1] % len(projections):
        return ()
    rows = shape[1] // len(projections)
    parts = []
    for expert in range(shape[0]):
        for index, projection in enumerate(projections):
            parts.append(
                StoredPart(
                    name=f"{module}.{expert}.{projection}.weight",
                    first=index * rows,
                    rows=rows,
                    expert=expert,
                )
            )
    return tuple(parts)


@functools.lru_cache(maxsize=64)
def fused_parts(arch: Architecture) -> Mapping[str, tuple[StoredPart, ...]]:
    """Return the tensors of a checkpoint that hold several of the table's, one below the other,
    with their parts in this order; nothing for an architecture without ``fused_projections``.
    """
    fused: dict[str, tuple[StoredPart, ...]] = {}
    shapes = hf_shapes(arch)
    for layer in range(arch.num_layers):
        prefix = _H.format(layer=layer)
        for whole, projections in _FUSED_PROJECTIONS.items():
            if whole.rpartition(".")[2] not in arch.fused_projections:
                continue
            parts = []
            first = 0
            for projection in projections:
                name = f"{prefix}{projection}.weight"
                rows = shapes[name][0]
                parts.append(StoredPart(name=name, first=first, rows=rows))
                first = first + rows
            fused[f"{prefix}{whole}.weight"] = tuple(parts)
    return MappingProxyType(fused)


@functools.lru_cache(maxsize=64)
def stored_names(arch: Architecture) -> Mapping[str, str]:
    """Return for each of the table's tensors the one of a checkpoint that holds it."""
    names = {name: name for name in hf_shapes(arch)}
    for whole, parts in fused_parts(arch).items():
        names.update({part.name: whole for part in parts})
    return MappingProxyType(names)


@functools.lru_cache(maxsize=64)
def stored_shapes(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint of the architecture: as
    :func:`hf_shapes`, with fused tensors in the place of their parts.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in hf_shapes(arch).items():
        stored = stored_names(arch)[name]
        rows, *columns = shape
        if stored in shapes:
            rows = rows + shapes[stored][0]
        shapes[stored] = (rows, *columns)
    return MappingProxyType(shapes)


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


def _norm_row(megatron: str, hf: str | None) -> list[Row]:
    """Return the row of a norm, nothing if the layer does not have it."""
    if hf is None:
        return []
    row = Row(
        megatron=f"{_M}{megatron}.weight", hf=(f"{_H}{hf}.weight",), interleaving="replicated"
    )
    return [row]


def _expert_rows(arch: Architecture) -> list[Row]:
    """Return the rows of a layer's router, experts and shared expert."""
    rows = [
        Row(
            megatron=f"{_M}mlp.router.weight",
            hf=(f"{_H}mlp.gate.weight",),
            interleaving="replicated",
        )
    ]
    if arch.router_bias:
        rows.append(
            Row(
                megatron=f"{_M}{ROUTER_BIAS}",
                hf=(f"{_H}{_CORRECTION_BIAS}",),
                interleaving="replicated",
            )
        )
    rows += _mlp_rows("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}")
    if arch.shared_ffn_hidden_size:
        rows += _mlp_rows("mlp.shared_experts", shared_expert(arch))
    if arch.shared_expert_gate:
        rows.append(
            Row(
                megatron=f"{_M}mlp.shared_experts.gate_weight",
                hf=(f"{_H}mlp.shared_expert_gate.weight",),
                interleaving="replicated",
            )
        )
    return rows


def shared_expert(arch: Architecture) -> str:
    """Return the name of the shared expert in a Hugging Face layer: Qwen2's, which has a gate, or
    DeepSeek's, several in one.
    """
    return "mlp.shared_expert" if arch.shared_expert_gate else "mlp.shared_experts"


@functools.lru_cache(maxsize=1024)
def layer_rows(arch: Architecture, layer: int) -> tuple[Row, ...]:
    """Return the rows of decoder layer ``layer`` (Llama's names, which Qwen2 and Qwen3 share)."""
    rows = [
        *_norm_row("input_layernorm", arch.norms.attention_input),
        *_attention_rows(),
        *_norm_row("self_attn_bda.norm", arch.norms.attention_output),
        *_norm_row("pre_mlp_layernorm", arch.norms.mlp_input),
        *_norm_row("mlp_bda.norm", arch.norms.mlp_output),
    ]
    if arch.has_experts(layer):
        rows += _expert_rows(arch)
    else:
        rows += _mlp_rows("mlp", "mlp")
    if arch.qkv_bias:
        rows.append(
            Row(
                megatron=f"{_M}self_attention.linear_qkv.bias",
                hf=tuple(f"{_H}self_attn.{p}_proj.bias" for p in "qkv"),
                interleaving="qkv",
            )
        )
    if arch.output_bias:
        rows.append(
            Row(
                megatron=f"{_M}self_attention.linear_proj.bias",
                hf=(f"{_H}self_attn.o_proj.bias",),
                interleaving="replicated",
            )
        )
    if arch.mlp_bias:
        rows.append(
            Row(
                megatron=f"{_M}mlp.linear_fc1.bias",
                hf=(f"{_H}mlp.gate_proj.bias", f"{_H}mlp.up_proj.bias"),
                interleaving="gate_up",
            )
        )
        rows.append(
            Row(
                megatron=f"{_M}mlp.linear_fc2.bias",
                hf=(f"{_H}mlp.down_proj.bias",),
                interleaving="replicated",
            )
        )
    if arch.qk_layernorm or arch.whole_qk_layernorm:
        interleaving: Interleaving = "norm_of_heads" if arch.whole_qk_layernorm else "replicated"
        for p in "qk":
            rows.append(
                Row(
                    megatron=f"{_M}self_attention.{p}_layernorm.weight",
                    hf=(f"{_H}self_attn.{p}_norm.weight",),
                    interleaving=interleaving,
                )
            )
    return tuple(rows)


def _attention_rows() -> list[Row]:
    """Return the rows of the attention's projections."""
    return [
        Row(
            megatron=f"{_M}self_attention.linear_qkv.weight",
            hf=tuple(f"{_H}self_attn.{p}_proj.weight" for p in "qkv"),
            interleaving="qkv",
        ),
        Row(
            megatron=f"{_M}self_attention.linear_proj.weight",
            hf=(f"{_H}self_attn.o_proj.weight",),
            interleaving="row",
        ),
    ]


EMBEDDING_ROW = Row(
    megatron="embedding.word_embeddings.weight", hf=(EMBEDDING,), interleaving="vocab"
)
FINAL_NORM_ROW = Row(
    megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), interleaving="replicated"
)


def output_row(arch: Architecture) -> Row:
    """Return the row of the output layer, which has a tensor or, if tied, is a copy of the
    embedding on the last pipeline stage.
    """
    return Row(
        megatron="output_layer.weight",
        hf=(EMBEDDING if arch.tied_embeddings else OUTPUT,),
        interleaving="vocab",
    )


@functools.lru_cache(maxsize=64)
def hf_shapes(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every Hugging Face tensor of the table, in checkpoint order; a checkpoint
    may hold several in one (:func:`stored_shapes`). Cached, because plans ask for every tensor.
    """
    h = arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, h)}
    for layer in range(arch.num_layers):
        prefix = _H.format(layer=layer)
        for name, shape in _layer_shapes(arch, layer).items():
            shapes[prefix + name] = shape
    shapes["model.norm.weight"] = (h,)
    if not arch.tied_embeddings:
        shapes[OUTPUT] = (arch.vocab_size, h)
    return MappingProxyType(shapes)


def _layer_shapes(arch: Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    h = arch.hidden_size
    d = arch.kv_channels
    q = arch.num_attention_heads * d
    kv = arch.num_query_groups * d
    shapes: dict[str, tuple[int, ...]] = {}
    before, *others = dataclasses.astuple(arch.norms)
    if before is not None:
        shapes[f"{before}.weight"] = (h,)
    shapes["self_attn.q_proj.weight"] = (q, h)
    shapes["self_attn.k_proj.weight"] = (kv, h)
    shapes["self_attn.v_proj.weight"] = (kv, h)
    shapes["self_attn.o_proj.weight"] = (h, q)
    for norm in others:
        if norm is not None:
            shapes[f"{norm}.weight"] = (h,)
    shapes |= _mlp_shapes(arch, layer)
    if arch.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (q,)
        shapes["self_attn.k_proj.bias"] = (kv,)
        shapes["self_attn.v_proj.bias"] = (kv,)
    if arch.output_bias:
        shapes["self_attn.o_proj.bias"] = (h,)
    if arch.mlp_bias:
        shapes["mlp.gate_proj.bias"] = (arch.ffn_hidden_size,)
        shapes["mlp.up_proj.bias"] = (arch.ffn_hidden_size,)
        shapes["mlp.down_proj.bias"] = (h,)
    return shapes | _qk_norm_shapes(arch)


def _mlp_shapes(arch: Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    h = arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    mlps = {"mlp": arch.ffn_hidden_size}
    if layer in arch.dense_layers:
        mlps = {"mlp": arch.dense_ffn_hidden_size}
    if arch.has_experts(layer):
        shapes["mlp.gate.weight"] = (arch.num_experts, h)
        experts = [f"mlp.experts.{expert}" for expert in range(arch.num_experts)]
        mlps = dict.fromkeys(experts, arch.ffn_hidden_size)
        if arch.router_bias:
            shapes[_CORRECTION_BIAS] = (arch.num_experts,)
        if arch.shared_expert_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, h)
        if arch.shared_ffn_hidden_size:
            mlps[shared_expert(arch)] = arch.shared_ffn_hidden_size
    for mlp, f in mlps.items():
        shapes[f"{mlp}.gate_proj.weight"] = (f, h)
        shapes[f"{mlp}.up_proj.weight"] = (f, h)
        shapes[f"{mlp}.down_proj.weight"] = (h, f)
    return shapes


def _qk_norm_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    d = arch.kv_channels
    queries = keys = d
    if arch.whole_qk_layernorm:
        queries = arch.num_attention_heads * d
        keys = arch.num_query_groups * d
    elif not arch.qk_layernorm:
        return {}
    return {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}


@functools.lru_cache(maxsize=64)
def engine_cuts(arch: Architecture) -> Mapping[str, EngineCut]:
    """Return how a tensor-parallel engine cuts each Hugging Face tensor of the architecture."""
    cuts: dict[str, EngineCut] = {}
    for row in (EMBEDDING_ROW, FINAL_NORM_ROW, output_row(arch)):
        cuts.update(zip(row.hf, row.engine_cuts, strict=True))
    for layer in range(arch.num_layers):
        for row in layer_rows(arch, layer):
            for expert in experts_of(arch, row):
                names = row.at(layer=0, expert=0, hf_layer=layer, hf_expert=expert).hf
                cuts.update(zip(names, row.engine_cuts, strict=True))
    return MappingProxyType(cuts)


@functools.lru_cache(maxsize=64)
def adapted(arch: Architecture, projections: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tensors to which a low-rank adapter on ``projections`` (``q_proj``, ...) adds."""
    endings = tuple(f".{projection}.weight" for projection in projections)
    return tuple(name for name in hf_shapes(arch) if name.endswith(endings))


def is_constant(name: str) -> bool:
    """Return whether a Hugging Face tensor is one that training leaves as it is, in fp32."""
    return name.endswith(_CORRECTION_BIAS)


def number_of_parameters(arch: Architecture) -> int:
    """Return the number of parameters of the whole model: tied embeddings once, no padding."""
    shapes = hf_shapes(arch)
    return sum(math.prod(shape) for name, shape in shapes.items() if not is_constant(name))


def engine_weight_bytes(arch: Architecture, itemsize: int, quantization: str | None) -> int:
    """Return the bytes of the weights of a whole engine, ``itemsize`` each. With a ``quantization``
    to FP8 it is one for those of linear layers, but for the output layer; embeddings, norms and
    biases stay as they are. Scales are not counted: four bytes for an output or a block of
    128 x 128 weights.
    """
    nbytes = number_of_parameters(arch) * itemsize
    if quantization is None:
        return nbytes
    linear = sum(
        math.prod(shape)
        for name, shape in hf_shapes(arch).items()
        if len(shape) == 2 and name not in (EMBEDDING, OUTPUT)
    )
    return nbytes - linear * (itemsize - 1)


def kv_bytes_per_token(
    arch: Architecture, itemsize: int, tensor_model_parallel_size: int = 1
) -> int:
    """Return the bytes of keys and values of one token in all layers on one engine rank. Heads are
    repeated if there are fewer than ranks.
    """
    groups = -(-arch.num_query_groups // tensor_model_parallel_size)
    return 2 * arch.num_layers * groups * arch.kv_channels * itemsize
