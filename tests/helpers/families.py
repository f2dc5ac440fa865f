"""The families of models that the tests make at random, one entry each: transformers' classes, and
what a configuration says besides the sizes that all have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# special tokens inside a small vocabulary, for families whose own are beyond it
SPECIAL = {"bos_token_id": 1, "pad_token_id": 0}


@dataclass(frozen=True)
class Family:
    """``name`` is that of transformers' classes (``NAMEForCausalLM``, ``NAMEConfig`` or
    ``config``). ``options`` go into the configuration, ``without`` sizes do not. Norms' weights are
    drawn around ``norm_center``.
    """

    name: str
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    norm_center: float = 1.0


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    # scaled down: the sequences of the tests go beyond it
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # scaled down: the sequences of the tests go beyond a quarter of it
    "original_max_position_embeddings": 64,
}
UNSCALED = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
QWEN3_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

FAMILIES = {
    "qwen3": Family(name="Qwen3"),
    "qwen3_biases": Family(name="Qwen3", options={"attention_bias": True, "hidden_act": "relu"}),
    "qwen3_yarn": Family(name="Qwen3", options={"rope_parameters": YARN}),
    "llama": Family(name="Llama", options={"rope_parameters": LLAMA3}),
    "llama_biases": Family(
        name="Llama", options={"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
    ),
    "mistral": Family(name="Mistral", options={"sliding_window": None}),
    "qwen2": Family(name="Qwen2", options={"hidden_act": "silu"}, without=("head_dim",)),
    "phi3": Family(name="Phi3", options=SPECIAL | {"rms_norm_eps": 1e-6}),
    "glm": Family(name="Glm", options=SPECIAL),
    "glm4": Family(name="Glm4", options=SPECIAL),
    "olmo2": Family(name="Olmo2", options=SPECIAL),
    "olmo3": Family(
        name="Olmo3",
        options=SPECIAL
        | {
            "sliding_window": 7,  # shorter than the sequences of the tests
            "rope_parameters": {"full_attention": YARN, "sliding_attention": UNSCALED},
        },
    ),
    "gemma3": Family(
        name="Gemma3",
        config="Gemma3TextConfig",
        options=SPECIAL
        | {
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 48,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": UNSCALED},
        },
        norm_center=0.0,  # they multiply by 1 + weight
    ),
    "qwen3_moe": Family(name="Qwen3Moe", options=QWEN3_EXPERTS | {"norm_topk_prob": True}),
    # vLLM's kernels pad the experts above to 64, and change nothing of the shape of these
    "qwen3_moe_unnormalized": Family(
        name="Qwen3Moe",
        options=QWEN3_EXPERTS | {"norm_topk_prob": False, "moe_intermediate_size": 64},
    ),
    "qwen3_moe_sparse": Family(
        name="Qwen3Moe",
        options=QWEN3_EXPERTS
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen2_moe": Family(
        name="Qwen2Moe",
        options=QWEN3_EXPERTS
        | {
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
            # vLLM reads no head_dim here, and has one of 32
            "hidden_size": 128,
            "initializer_range": 0.1,
        },
        without=("head_dim",),
    ),
    "glm4_moe": Family(
        name="Glm4Moe", options=SIGMOID_EXPERTS | {"attention_bias": True, "use_qk_norm": True}
    ),
    "dots1": Family(
        name="Dots1",
        options=SIGMOID_EXPERTS | {"n_group": 4, "topk_group": 2, "sliding_window": None},
    ),
}


def tiny_model(path: Path, family: str, tied: bool, layers: int) -> Path:
    """Save a random model of the family, peaky enough for an error to show."""
    import torch

    sizes = {
        "vocab_size": 331,  # prime: padding is needed at every TP size
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    model = random_model(family, sizes)
    if family == "phi3":
        # the numbers are those of "mistral"
        torch.manual_seed(0)
        apart = random_model("mistral", sizes)
        model.load_state_dict(_fused(apart.state_dict()))
    draw_small_tensors(model, family)
    model.save_pretrained(path)
    return path


def random_model(
    family: str, sizes: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Any:
    """Return a random model of transformers: of ``sizes``, which the family's options change, and
    those the ``options``.
    """
    import transformers

    entry = FAMILIES[family]
    settings = {k: v for k, v in sizes.items() if k not in entry.without}
    settings |= {**entry.options, **(options or {})}
    config = getattr(transformers, entry.config or f"{entry.name}Config")(**settings)
    return getattr(transformers, f"{entry.name}ForCausalLM")(config)


def draw_small_tensors(model: torch.nn.Module, family: str) -> None:
    """Draw norms and biases, which transformers begins with ones and zeros."""
    import torch

    center = FAMILIES[family].norm_center
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, center - 0.5, center + 0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            # as wide as the scores, so that it decides which experts are chosen
            torch.nn.init.uniform_(buffer, -0.3, 0.3)


def _fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with queries, keys and values of each layer in one, and gate
    and up in another, as Phi-3 has them.
    """
    import torch

    tensors = dict(tensors)
    for first in [name for name in tensors if name.endswith(".q_proj.weight")]:
        names = [first.replace(".q_proj.", f".{p}_proj.") for p in "qkv"]
        tensors[first.replace(".q_proj.", ".qkv_proj.")] = torch.cat(
            [tensors.pop(name) for name in names]
        )
    for first in [name for name in tensors if name.endswith(".gate_proj.weight")]:
        names = [first, first.replace(".gate_proj.", ".up_proj.")]
        tensors[first.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(
            [tensors.pop(name) for name in names]
        )
    return tensors
