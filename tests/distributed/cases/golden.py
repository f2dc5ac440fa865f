"""One rank: the golden group through the trainer's own update (policy, schedule, denominators) for every method.

The policy's log-probs are what they are; the old ones are set so that each token has the golden ratio. The loss of every
method that reads log-probs through the ratio only is then the golden number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_dcpo.config import RolloutConfig, TrainingConfig
from megatron_dcpo.objectives import ObjectiveConfig, build_method
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.training.updater import Updater, UpdateStatistics
from megatron_dcpo.types import Prompt, Response, TrainingSample, replaced
from tests.distributed.cases.common import config_for_test, initialize_layout, parallel_config
from tests.helpers.objective_cases import GOLDEN_OPTIONS, NEW, OLD, OTHER_LOSSES, golden_judgements


def samples_for_test(order: list[int]) -> list[TrainingSample]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 331, len(row)) for row in OLD]
    judgements = golden_judgements()
    prompt = Prompt("p0", (), (5, 6, 7), "", "math")
    return [
        TrainingSample(prompt, Response("p0", i, ids[i], np.zeros(len(ids[i]), np.float32), "stop", 0), judgements[i])
        for i in order
    ]


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options["parallel"])
    topology = initialize_layout(parallel)
    training = TrainingConfig(micro_batch_size=options["micro_batch_size"], max_tokens_per_micro_batch=40)
    # many losses of one policy: it does not move
    config = config_for_test(options["model"], "fp32", parallel, lr=0.0, weight_decay=0.0)
    policy = build_policy(config.model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    order = options["order"]
    samples = samples_for_test(order)
    result: dict[str, Any] = {"losses": {}, "norms": {}}
    others = {name: method_options for name, (method_options, _) in OTHER_LOSSES.items()}
    for name, method_options in (GOLDEN_OPTIONS | others).items():
        method = build_method(ObjectiveConfig(**method_options))
        updater = Updater(policy, optimizer, method, None, None, parallel, RolloutConfig(), training)
        with_old = updater.with_old_logprobs(samples)
        new = [sample.old_logprobs for sample in with_old]
        golden = [
            replaced(sample, old_logprobs=row - (NEW[i] - OLD[i]))
            for sample, row, i in zip(with_old, new, order, strict=True)
        ]
        statistics: UpdateStatistics = {
            "sums": {}, "maxima": {}, "losses": [], "grad_norms": [], "block_gradients": {}, "coefficients": {},
            "learning_rate": 0.0,
            "skipped": 0,
        }  # fmt: skip
        updater.update_once(method.score(golden), statistics, probe=False, step=1)
        result["losses"][name] = statistics["losses"][0]
        result["norms"][name] = statistics["grad_norms"][0]
        result["new"] = {str(i): row.tolist() for row, i in zip(new, order, strict=True)}
    all_gather_objects(None)
    return result
