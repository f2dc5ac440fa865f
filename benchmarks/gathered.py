"""Bytes that a rank receives in a step: with a batch that is dealt, and with one that is gathered.

    python benchmarks/run.py gathered

Judged responses of made-up tokens pass through the same calls as in a step: a gather of summaries
and judgements, and a fetch of the responses that each rank computes. What is counted is the pickled
size of everything that comes from other ranks; before, every response was gathered by every rank.
Data parallel on 8 ranks, 32 groups of 8 responses; with the expert choices of Qwen3-30B-A3B (48
layers, 8 experts a token) and without. The responses are the same afterwards, token by token.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from measurement import QUICK, Measurement

RANKS, GROUPS, GROUP = 8, 32, 8
LAYERS, EXPERTS = 48, 8
MEDIAN = 20 if QUICK else 800  # tokens of a response, log-normal


@dataclass
class Wire:
    """Eight ranks that are threads of this process, and the bytes that each has received."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS))
    brought: list[Any] = field(default_factory=lambda: [None] * RANKS)
    received: list[int] = field(default_factory=lambda: [0] * RANKS)

    def meet(self, rank: int, value: Any) -> list[Any]:
        """Return what every rank has brought."""
        self.brought[rank] = value
        self.barrier.wait(600)
        values = list(self.brought)
        self.barrier.wait(600)
        return values


class RankOfWire:
    """The part of ``runtime.distributed.Collectives`` that dealing uses."""

    ranks = range(RANKS)

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank

    def _count(self, values: Sequence[Any]) -> None:
        others = [value for rank, value in enumerate(values) if rank != self.rank]
        self.wire.received[self.rank] += sum(len(pickle.dumps(value, 5)) for value in others)

    def gather(self, value: Any) -> list[Any]:
        values = self.wire.meet(self.rank, value)
        self._count(values)
        return values

    def exchange(self, outgoing: Sequence[Any]) -> list[Any]:
        values = [brought[self.rank] for brought in self.wire.meet(self.rank, list(outgoing))]
        self._count(values)
        return values


def responses(with_experts: bool) -> list[Any]:
    """One response after the other, of all groups."""
    from megatron_dcpo.types import Response

    rng = np.random.default_rng(0)
    made = []
    for number in range(GROUPS * GROUP):
        length = max(1, round(MEDIAN * rng.lognormal(0.0, 0.7)))
        experts = None
        if with_experts:
            experts = rng.integers(0, 128, (length + 63, LAYERS, EXPERTS)).astype(np.int16)
        made.append(
            Response(
                prompt_id=f"p{number // GROUP}",
                sample_index=number % GROUP,
                token_ids=rng.integers(0, 151_936, length),
                logprobs=-rng.random(length, np.float32),
                finish_reason="stop",
                weights_version=0,
                experts=experts,
            )
        )
    return made


def dealt(collectives: Any, own: list[Any], judgements: dict[Any, Any]) -> list[Any]:
    """The responses that this rank computes, as the sampler and the updater get them."""
    from megatron_dcpo.policy.batching import assign_to_ranks
    from megatron_dcpo.training.dealing import Summary, fetch
    from megatron_dcpo.types import Prompt, TrainingSample

    here = {response.key: response for response in own}
    everyone = collectives.gather([(Summary.of(r), judgements[r.key]) for r in own])
    samples = []
    for rank, of_rank in enumerate(everyone):
        for summary, judgement in of_rank:
            response = here.get(summary.response.key) or summary.restored(rank)
            prompt = Prompt(response.prompt_id, (), (), "", "")
            samples.append(TrainingSample(prompt, response, judgement))
    samples.sort(key=lambda sample: sample.response.key)
    lengths = [len(sample.response_ids) for sample in samples]
    share = assign_to_ranks(lengths, RANKS)[collectives.rank]
    complete = fetch(samples, share, collectives)
    return [complete[index].response for index in share]


def measurements() -> Iterator[Measurement]:
    from megatron_dcpo.types import Judgement

    for with_experts in (False, True):
        made = responses(with_experts)
        judgements = {
            r.key: Judgement(r.prompt_id, 1.0, 0.5, "ok", 1, len(r.token_ids)) for r in made
        }
        groups = [made[start : start + GROUP] for start in range(0, len(made), GROUP)]
        shares = [[r for group in groups[rank::RANKS] for r in group] for rank in range(RANKS)]
        wire = Wire()

        def of_rank(rank: int, wire: Wire = wire, shares: Any = shares, judged: Any = judgements):
            return dealt(RankOfWire(wire, rank), shares[rank], judged)

        with ThreadPoolExecutor(RANKS) as pool:
            computed = [response for share in pool.map(of_rank, range(RANKS)) for response in share]
        sizes = [len(pickle.dumps([(r, judgements[r.key]) for r in share], 5)) for share in shares]
        same = len(computed) == len(made) and all(
            np.array_equal(response.token_ids, whole.token_ids)
            and np.array_equal(response.logprobs, whole.logprobs)
            for response, whole in zip(
                sorted(computed, key=lambda r: r.key),
                sorted(made, key=lambda r: r.key),
                strict=True,
            )
        )
        yield Measurement(
            f"gathered/{'with' if with_experts else 'without'} expert choices",
            float(max(wire.received)),
            float(sum(sizes) - min(sizes)),
            "bytes that the busiest of 8 ranks receives in a step",
            "every response gathered by every rank",
            goal=0.25,
            same=same,
            raw={"received": wire.received, "bytes of a rank's responses": sizes},
        )


if __name__ == "__main__":
    for measurement in measurements():
        print(measurement.line("python benchmarks/run.py gathered"))
