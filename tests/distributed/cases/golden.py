"""One rank: the golden group through the trainer's own update (policy, schedule, denominators) for
every method.

The policy's log-probs are what they are; the old ones are set so that each token has the golden
ratio. The loss of every method that reads log-probs through the ratio only is then the golden
number.

Beside it a group without a gradient, once computed and once left out.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import torch

from lab.gradient_probe import part_gradient
from megatron_dcpo.config import TrainingConfig
from megatron_dcpo.objectives import ObjectiveConfig, build_method
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.training.dealing import samples_to_train
from megatron_dcpo.training.trainer import Trainer, UpdateStatistics
from megatron_dcpo.training.updater import Updater
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample, replaced
from tests.distributed.cases.common import config_for_test, initialize_layout, parallel_config
from tests.helpers.objective_cases import (
    GOLDEN_OPTIONS,
    LEFT_OUT,
    NEW,
    OLD,
    OTHER_LOSSES,
    golden_judgements,
)


def samples_for_test(order: list[int]) -> list[TrainingSample]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 331, len(row)) for row in OLD]
    judgements = golden_judgements()
    prompt = Prompt("p0", (), (5, 6, 7), "", "math")
    return [
        TrainingSample(
            prompt,
            Response("p0", i, ids[i], np.zeros(len(ids[i]), np.float32), "stop", 0),
            judgements[i],
        )
        for i in order
    ]


def samples_without_gradient(count: int) -> list[TrainingSample]:
    """A group that is right throughout, with one confidence; longer than the others, so that it
    would fill micro-batches.
    """
    rng = np.random.default_rng(2)
    lengths = [int(rng.integers(5, 30)) for _ in range(count)]
    return [
        TrainingSample(
            Prompt("p1", (), (8, 9), "", "math"),
            Response(
                "p1", i, rng.integers(1, 331, length), np.zeros(length, np.float32), "stop", 0
            ),
            Judgement("p1", 1.0, 0.75, "ok", length - 2, length),
        )
        for i, length in enumerate(lengths)
    ]


def with_old_logprobs(updater: Updater, samples: list[TrainingSample]) -> list[TrainingSample]:
    """Fill ``old_logprobs`` on every rank, as no run needs them: other log-probs are made
    of them.
    """
    here = {
        index: sample.old_logprobs
        for index, sample in enumerate(updater.with_old_logprobs(samples))
        if sample.old_logprobs is not None
    }
    rows = {index: row for rank in all_gather_objects(here) for index, row in rank.items()}
    return [replaced(sample, old_logprobs=rows[index]) for index, sample in enumerate(samples)]


def left_out(updater: Updater, samples: list[TrainingSample]) -> dict[str, Any]:
    """Loss and gradient of all samples and of those that are computed."""
    scored = updater.method.score(with_old_logprobs(updater, samples))
    some = samples_to_train(scored, updater.method, {})
    losses, gradients = [], []
    for taken in (scored, some):
        backward = partial(updater.accumulate, taken)
        trainer = updater.trainer
        parts, found = part_gradient(trainer.policy, trainer.optimizer.megatron, backward)
        ranks = all_gather_objects(parts if trainer.topology.reports else [])
        losses.append(sum(part["loss"] for rank in ranks for part in rank))
        gradients.append(torch.cat([one.gradient.flatten() for one in found]))
    apart = [
        float((gradients[0] - gradients[1]).square().sum()),
        float(gradients[0].square().sum()),
    ]
    return {"losses": losses, "apart": apart, "computed": [len(scored), len(some)]}


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options["parallel"])
    topology = initialize_layout(parallel)
    training = TrainingConfig(
        micro_batch_size=options["micro_batch_size"], max_tokens_per_micro_batch=40
    )
    # many losses of one policy: it does not move
    config = config_for_test(options["model"], "fp32", parallel, lr=0.0, weight_decay=0.0)
    config = dataclasses.replace(config, training=training)
    policy = build_policy(config.model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    order = options["order"]
    samples = samples_for_test(order)
    result: dict[str, Any] = {"losses": {}, "norms": {}, "left_out": {}}
    others = {name: method_options for name, (method_options, _) in OTHER_LOSSES.items()}
    trainer = Trainer(policy, optimizer, config.parallel, training)
    first = Updater(
        trainer, build_method(ObjectiveConfig()), None, teacher=None, callback=None, config=config
    )
    with_old = with_old_logprobs(first, samples)
    new = [sample.old_logprobs for sample in with_old]
    result["new"] = {str(i): row.tolist() for row, i in zip(new, order, strict=True)}
    golden = [
        replaced(sample, old_logprobs=row - (NEW[i] - OLD[i]))
        for sample, row, i in zip(with_old, new, order, strict=True)
    ]
    for name, method_options in (GOLDEN_OPTIONS | others).items():
        method = build_method(ObjectiveConfig(**method_options))
        updater = Updater(trainer, method, None, teacher=None, callback=None, config=config)
        statistics = UpdateStatistics()
        updater.update_once(method.score(golden), statistics, step=1)
        result["losses"][name] = statistics.losses[0]
        result["norms"][name] = statistics.grad_norms[0]
        if name in LEFT_OUT:
            idle = samples_without_gradient(20)
            result["left_out"][name] = left_out(updater, idle[:3] + samples + idle[3:])
            result["left_out"][f"{name}, no gradient at all"] = left_out(updater, idle[:9])
    all_gather_objects(None)
    return result
