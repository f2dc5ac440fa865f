"""The options of an engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine in this process; all but a few are vLLM's alone.

    head_dtype: that of ``model.head_dtype``.
    max_model_len: 0 leaves it to vLLM.
    responses: the number requested at a time, if it is known; if it is less than ``max_num_seqs``,
        the engine has as many slots.
    dummy_weights: whether to start with random weights; the first update brings the real ones.
    raw_logprobs: whether the engine reports log-probs of the raw logits, which is fixed for its
        life (see ``engine.SamplingConfig``).
    record_experts: whether responses have ``experts``.
    arguments: other engine arguments of vLLM, by name.
    """

    dtype: str = "bf16"
    head_dtype: str = "auto"
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    max_model_len: int = 0
    max_num_seqs: int = 512
    responses: int = 0
    sleep: bool = True
    raw_logprobs: bool = False
    record_experts: bool = False
    dummy_weights: bool = False
    seed: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantization(self) -> str | None:
        """Return vLLM's name of what it quantizes the weights to when it loads them, if it does."""
        return self.arguments.get("quantization") or None

    @property
    def at_once(self) -> int:
        """Return how many responses the engine samples at once."""
        return min(self.max_num_seqs, self.responses or self.max_num_seqs)
