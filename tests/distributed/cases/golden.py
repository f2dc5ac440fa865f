"""One rank: the golden group through the trainer's own update (policy, schedule, denominators) for every method.

The policy's log-probs are what they are; the old ones are set so that each token has the golden ratio. The loss of every
method that reads log-probs through the ratio only is then the golden number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from megatron_dcpo.objectives.expected_digits import DecimalToken, DigitVocabulary
from megatron_dcpo.training.sampling import TrainingSample
from megatron_dcpo.training.update import MiniBatch, UpdateStatistics, score, update_once, with_old_logprobs

from megatron_dcpo.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_dcpo.objectives import ObjectiveConfig, build_objective
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import build_optimizer
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.training.run import RunState, TrainingRun
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.distributed.cases.common import initialize_layout
from tests.helpers.objective_cases import GOLDEN_OPTIONS, NEW, OLD, golden_judgements

DIGITS: dict[str, dict[str, Any]] = {
    "all digits": {"preset": "dcpo_proper"},
    "sampled digit": {"preset": "dcpo_proper", "confidence_gradient": "sampled"},
}


def samples_for_test(order: list[int]) -> list[TrainingSample]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 331, len(row)) for row in OLD]
    judgements = golden_judgements()
    prompt = Prompt("p0", (), (5, 6, 7), "", "math")
    return [
        TrainingSample(prompt, Response("p0", i, ids[i], np.zeros(len(ids[i]), np.float32), "stop", 0), judgements[i])
        for i in order
    ]


class DigitsForTest(DigitVocabulary):
    """Digits where :func:`decimals_for_test` has them, whatever the random ids stand for."""

    def decimals(self, token_ids: Any, judgement: Judgement) -> tuple[DecimalToken, ...]:
        return decimals_for_test(judgement)


def decimals_for_test(judgement: Judgement) -> tuple[DecimalToken, ...]:
    """One token of two digits, or two of one, by turns: which is which, only the tests need to know."""
    if judgement.confidence is None or judgement.confidence >= 1 or judgement.length - judgement.boundary < 2:
        return ()
    digits, last = round(judgement.confidence * 100), judgement.length - 1
    if judgement.correct:
        return (DecimalToken(last, digits, 2, 2),)
    return DecimalToken(last - 1, digits // 10, 1, 1), DecimalToken(last, digits % 10, 1, 2)


def run(options: dict[str, Any]) -> Any:
    parallel = ParallelConfig(**options["parallel"])
    topology = initialize_layout(parallel)
    training = TrainingConfig(micro_batch_size=options["micro_batch_size"], max_tokens_per_micro_batch=40)
    config = Config(
        run_dir="unused",
        model=ModelConfig(path=options["model"], params_dtype="fp32"),
        data=DataConfig(path="unused"),
        parallel=parallel,
        training=training,
        optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0),  # many losses of one policy
    )
    policy = build_policy(config.model, parallel, topology)
    optimizer, scheduler = build_optimizer(config, policy)
    order = options["order"]
    samples = samples_for_test(order)
    result: dict[str, Any] = {"losses": {}, "norms": {}}
    for name, method in (GOLDEN_OPTIONS | DIGITS).items():
        objective = build_objective(ObjectiveConfig(**method))
        parts: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(TrainingRun))
        parts |= {"config": config, "topology": topology, "policy": policy, "optimizer": optimizer}
        parts |= {"scheduler": scheduler, "objective": objective, "progress": RunState()}
        tables = {1: np.arange(160, 170), 2: np.arange(200, 300)}  # on both ranks of two
        parts |= {"digits": DigitsForTest(tables, lambda token_id: b"", ())}
        trainer = TrainingRun(**parts)  # what an update does not touch stays None
        mini_batch = with_old_logprobs(trainer, MiniBatch.of(trainer, samples))
        new = [sample.old_logprobs for sample in mini_batch.samples]
        old = {k: {"old_logprobs": lp - (NEW[i] - OLD[i])} for k, (lp, i) in enumerate(zip(new, order, strict=True))}
        statistics = UpdateStatistics()
        update_once(trainer, score(trainer, mini_batch.with_fields(old)), statistics, probe=False, step=1)
        result["losses"][name] = statistics.losses[0]
        result["norms"][name] = statistics.grad_norms[0]
        result["new"] = {str(i): lp.tolist() for lp, i in zip(new, order, strict=True)}
    all_gather_objects(None)
    return result
