"""Which slice of each Hugging Face tensor a tensor-parallel engine rank keeps. Pure; vLLM's rule for dense models."""

from __future__ import annotations

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.table import hf_shapes

VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it cuts it


def check_engine(arch: Architecture, tensor_model_parallel_size: int) -> None:
    """Raise :class:`UserError` for an engine tensor-parallel size that does not divide the model."""
    tp, groups = tensor_model_parallel_size, arch.num_query_groups
    for what, size in (("attention heads", arch.num_attention_heads), ("ffn_hidden_size", arch.ffn_hidden_size)):
        if size % tp:
            raise UserError(
                f"rollout.tensor_model_parallel_size={tp} does not divide the model's {size} {what}; "
                f"choose a divisor of {size}"
            )
    if max(tp, groups) % min(tp, groups):
        raise UserError(
            f"rollout.tensor_model_parallel_size={tp} neither divides the model's {groups} key/value heads nor is a "
            "multiple of them"
        )
    padded = -(-arch.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % tp:
        raise UserError(f"rollout.tensor_model_parallel_size={tp} does not divide the padded vocabulary of {padded}")


def engine_slice(arch: Architecture, name: str, tp: int, rank: int) -> tuple[int, int, int]:
    """(dimension, start, stop) of tensor ``name`` on engine rank ``rank`` of ``tp``; norms are kept whole.

    The dimension is the one Megatron cuts along, too: output rows, or input columns of o_proj and down_proj.
    """
    shape, kind = hf_shapes(arch)[name], name.split(".")[-2]
    dim = 1 if kind in ("o_proj", "down_proj") else 0
    if kind.endswith("norm"):
        return dim, 0, shape[dim]
    if kind in ("k_proj", "v_proj") and tp > arch.num_query_groups:
        head = rank * arch.num_query_groups // tp  # fewer key/value heads than ranks: each is repeated
        return dim, head * arch.kv_channels, (head + 1) * arch.kv_channels
    if kind in ("embed_tokens", "lm_head"):
        per_rank = -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp
        return dim, min(rank * per_rank, shape[0]), min((rank + 1) * per_rank, shape[0])
    return dim, rank * shape[dim] // tp, (rank + 1) * shape[dim] // tp
