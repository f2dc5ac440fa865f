"""What an engine is: it samples responses, and it takes new weights piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_dcpo.types import Prompt, Response
from megatron_dcpo.weights.piece import Piece


@dataclass(frozen=True)
class SamplingConfig:
    """``n`` responses per prompt. ``top_k`` 0 and ``top_p`` 1 are off; ``max_tokens`` counts EOS.

    ``raw_logprobs``: report log-probs of the raw logits instead of the distribution that was sampled (temperature,
    top-k, top-p). Training needs the latter; evaluation the former, which the temperature of an evaluation does not
    change (vLLM's ``raw_logprobs``). ``top_logprobs``: also the K largest of every position, always of the raw logits.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 3000
    seed: int = 0
    raw_logprobs: bool = False
    top_logprobs: int = 0


class Engine(Protocol):
    """A rollout engine. ``weights_version`` counts the updates received and is stamped on every response."""

    weights_version: int

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int = 0) -> list[Response]:
        """``sampling.n`` responses per prompt, prompt-major. A response depends on its prompt, the weights, the seed,
        the step and its index only, not on what else is in the batch.

        Raises :class:`megatron_dcpo.signals.RolloutAbandoned` soon after ``signals.stop_requested()`` turns true."""
        ...

    def update_weights(self, pieces: Iterable[Piece], version: int) -> None:
        """Overwrite the engine's weights; complete when it returns."""
        ...


def uniforms(seed: int, step: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """float64 [count] uniform numbers in [0, 1) of one response: counted, so that any batching, resumption or split over
    ranks draws the same ones (Philox, keyed by a hash of the four names)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt_id}/{sample_index}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)
