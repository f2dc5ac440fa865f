"""DCPO in prime-rl: an algorithm with an advantage for each block of a response (its orchestrator
of August 2026, commit 559b447).

    # before the orchestrator starts
    import prime_rl_dcpo; prime_rl_dcpo.install("/models/Qwen3-8B")

    [orchestrator.algo]
    type = "grpo"

prime-rl builds an algorithm by its ``type``; ours takes that of GRPO, whose options it has. The
environment's task has the right answer (``trace.task.data.answer``); its reward is only logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import dcpo
from prime_rl.orchestrator import algo
from prime_rl.orchestrator.algo.base import iter_trainable_traces
from transformers import AutoTokenizer

from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.objectives.method import Method

if TYPE_CHECKING:
    import verifiers.v1 as vf


class DCPOAlgorithm(algo.GRPOAlgorithm):
    """DCPO on the sampled tokens of each trace, one group per example."""

    tokens: ClassVar[TokenBytes]
    eos_ids: ClassVar[set[int]]
    objective: ClassVar[Method]

    async def score_group(self, episodes: list[vf.Episode]) -> None:
        """Give every sampled token of the group the advantage of its block."""
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        scored = dcpo.score(
            [sampled_ids(trace) for trace in traces],
            answers=[str(trace.task.data.answer) for trace in traces],
            groups=["group"] * len(traces),
            tokens=self.tokens,
            eos_ids=self.eos_ids,
            objective=self.objective,
        )
        for trace, advantages in zip(traces, scored.advantages, strict=True):
            algo.assign_advantages(trace, advantages.tolist())


def sampled_ids(trace: vf.Trace) -> list[int]:
    """Return the ids that the policy sampled, in the order of the trace's nodes."""
    ids = []
    for node in trace.nodes:
        for token, sampled in zip(node.token_ids, node.mask, strict=True):
            if sampled:
                ids.append(token)
    return ids


def install(model: str, **options: object) -> type[DCPOAlgorithm]:
    """Register the algorithm for the tokenizer of ``model``; ``options`` are DCPO's."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    DCPOAlgorithm.tokens = token_bytes(tokenizer)
    DCPOAlgorithm.eos_ids = {tokenizer.eos_token_id}
    DCPOAlgorithm.objective = dcpo.method(**options)  # type: ignore[arg-type]
    algo.ALGORITHM_CLASSES["grpo"] = DCPOAlgorithm
    return DCPOAlgorithm
