"""A plan with what a rehearsal of its job counted, in place of what formulas say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_dcpo.planning.plan import Plan, RehearsedMemory
from megatron_dcpo.planning.step_time import step_seconds
from megatron_dcpo.planning.traffic import BytesSent

# the groups of ``BytesSent``, by a rehearsal's names
_GROUPS = {
    "tensor_parallel": ("tensor parallel",),
    "context_parallel": ("context parallel",),
    "expert_parallel": ("experts",),
    "pipeline": ("pipeline", "embeddings"),
}
_OF_GRADIENTS = ("data parallel", "replicas of experts")


def with_rehearsal(plan: Plan, ranks: Sequence[dict[str, Any]]) -> Plan:
    """Return ``plan`` with the memory and the traffic that were counted for the ``ranks`` of a
    rehearsal. What a rehearsal does not have stays as it is: the engine, and the time of what is
    computed.
    """
    engines = [stage.engine for stage in plan.stages]
    memory = RehearsedMemory(
        training=max(_training(plan, rank) + engines[rank["stage"]] for rank in ranks),
        saving=max(_phase(rank, "checkpoint")["peak"] + engines[rank["stage"]] for rank in ranks),
    )
    load = dataclasses.replace(plan.load, traffic=_traffic(plan, ranks))
    seconds = step_seconds(
        arch=plan.arch,
        layout=plan.layout,
        config=plan.config,
        load=load,
        machine=plan.machine,
        rates=plan.rates,
    )
    return dataclasses.replace(plan, load=load, seconds=seconds, rehearsed=memory)


def _training(plan: Plan, rank: dict[str, Any]) -> int:
    """Return the peak of an update with micro-batches as large as the options allow. Those of a
    rehearsal have a whole number of the longest responses.
    """
    at_rest = _phase(rank, "first update")["live"]
    activations = _phase(rank, "update")["peak"] - at_rest
    context_parallel = plan.config.parallel.context_parallel_size
    largest = plan.tokens_per_micro_batch / context_parallel / rank["tokens"]
    return at_rest + int(activations * max(largest, 1))


def _traffic(plan: Plan, ranks: Sequence[dict[str, Any]]) -> BytesSent:
    """Return the bytes that the busiest rank sends in a step: those for gradients once in every
    update, all others in proportion to the tokens.
    """
    batch = ranks[0]["batch"]
    updates = plan.work.updates / batch["updates"]
    replicas = plan.data_parallel * plan.config.parallel.context_parallel_size
    rehearsed = batch["updates"] * batch["micro_batches"] * ranks[0]["tokens"]
    tokens = plan.work.tokens / replicas / rehearsed
    of_tokens = {
        name: int(tokens * max(_sent(rank, groups) for rank in ranks))
        for name, groups in _GROUPS.items()
    }
    gradients = int(updates * max(_sent(rank, _OF_GRADIENTS) for rank in ranks))
    return BytesSent(data_parallel=gradients, **of_tokens)


def _sent(rank: dict[str, Any], groups: Iterable[str]) -> int:
    traffic = _phase(rank, "update")["traffic"]
    return sum(sent["nbytes"] for sent in traffic if sent["group"] in groups)


def _phase(rank: dict[str, Any], name: str) -> dict[str, Any]:
    phase: dict[str, Any] = next(phase for phase in rank["phases"] if phase["name"] == name)
    return phase
