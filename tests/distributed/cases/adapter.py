"""One rank: train a policy on its responses and an adapter on the statements behind them, in the given layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dcpo.config import AdapterConfig, ParallelConfig
from megatron_dcpo.judging.statement import NUM_FEATURES, StatementForm
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.objectives.stated import statement_losses
from megatron_dcpo.policy.adapter import AdapterOptimizer
from megatron_dcpo.policy.batching import LossInputs
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import build_optimizer, gather_parameters, gradient_norm, zero_gradients
from megatron_dcpo.policy.schedule import accumulate_gradients
from megatron_dcpo.policy.statements import StatementInputs, adapt
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.weights.peft_adapter import DIRECTORY, TOKENS, write_adapter
from tests.distributed.cases.common import config_for_test, initialize_layout, samples_for_test, shared_out
from tests.distributed.cases.policy import digest


def form_for_test(choices: int, activated: bool = True) -> StatementForm:
    return StatementForm(" sure: 0.", (7, 11, 13), np.arange(40, 40 + choices), activated)


def reasoning_of(sample: Any) -> int:
    return max(1, len(sample.response_ids) * 2 // 3)


def features_of(everything: list[Any]) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((len(everything), NUM_FEATURES)).astype(np.float32)


def inputs_of(form: StatementForm, everything: list[Any], mine: Any) -> LossInputs:
    """A statement behind part of each response, scored by numbers that differ from sample to sample."""
    places = [next(i for i, other in enumerate(everything) if other is sample) for sample in mine]
    scores = -np.random.default_rng(1).random((len(everything), form.values))
    features = features_of(everything)
    after = [len(s.prompt_ids) + reasoning_of(s) for s in mine]
    weights = np.array([(1 + place % 3) / len(everything) for place in places])
    own = scores[places].reshape(-1, form.values), weights, features[places].reshape(-1, NUM_FEATURES)
    return LossInputs(statements=StatementInputs(form, after, *own))


def measure(setting: dict[str, Any], options: dict[str, Any], topology: Any) -> dict[str, Any]:
    parallel = ParallelConfig(**setting["parallel"])
    config = config_for_test(
        options["model"],
        setting.get("dtype", "fp32"),
        parallel,
        lr=setting.get("lr", 1e-3),
        adapter_lr=1e-2,
        adam_eps=1e-4,
    )
    policy = build_policy(config.model, parallel, topology)
    optimizer, scheduler = build_optimizer(config, policy)
    adapter = None
    if setting.get("adapter", True):
        own_tokens = 101 * (setting.get("choices") == 101)
        adapted = adapt(policy, AdapterConfig(rank=4, alpha=8), NUM_FEATURES, own_tokens)
        if own_tokens and policy.gpt[-1].post_process:  # zero, a first step would train nothing else
            rows = torch.randn(101, policy.arch.hidden_size, generator=torch.Generator().manual_seed(3))
            adapted.parameters[TOKENS].data.copy_(0.1 * rows)
        adapter = AdapterOptimizer(adapted, config.optimizer, 100)
    samples, form = samples_for_test(), form_for_test(setting.get("choices", 10), setting.get("activated", True))
    indices, splits = shared_out(samples, parallel, topology, 2, max_tokens=260)
    mine = [samples[i] for i in indices]
    total = sum(len(sample.response_ids) for sample in samples)

    last: dict[int, Any] = {}

    def loss(batch: Any, outputs: Any) -> Any:
        value = -((1 + batch.targets % 3).float() / total * outputs.logprobs).sum()
        return value, {"loss": float(value.detach())}

    def statement_loss(batch: Any, logits: Any) -> Any:
        losses = statement_losses(logits, batch.statements.scores, ObjectiveConfig())
        value = (losses * batch.statements.weights).sum()
        places = [next(i for i, other in enumerate(samples) if other is sample) for sample in batch.samples]
        last.update(zip(places, logits.tolist(), strict=False))
        return value, {"stated": float(value.detach()), "logits": float(logits[: batch.statements.count].abs().sum())}

    measured: dict[str, Any] = {"losses": [], "stated": [], "logits": [], "norms": [], "adapter_norms": []}
    once = topology.is_last_stage and topology.tp_rank == 0
    for _ in range(3):
        saved = {} if adapter is None else {n: t.clone() for n, t in adapter.adapter.whole().items()}
        zero_gradients(policy, optimizer)
        if adapter is not None:
            adapter.zero_grad()
        parts = accumulate_gradients(
            policy,
            mine,
            splits,
            loss,
            temperature=1.0,
            packing=parallel.sequence_packing,
            separable=True,
            inputs=None if adapter is None else lambda own: inputs_of(form, samples, own),
            statement_loss=statement_loss,
        )
        everyone = [part for rank in all_gather_objects(parts if once else []) for part in rank]
        measured["losses"].append(sum(part["loss"] for part in everyone))
        measured["norms"].append(gradient_norm(optimizer))
        optimizer.step()
        scheduler.step(1)
        gather_parameters(policy)
        if adapter is not None:
            measured["stated"].append(sum(part["stated"] for part in everyone))
            measured["logits"].append(sum(part["logits"] for part in everyone))
            measured["adapter_norms"].append(adapter.reduce())
            adapter.step(measured["adapter_norms"][-1])
    if adapter is not None:
        measured["adapter"] = {n: t.double().sum().item() for n, t in adapter.adapter.whole().items()}
    if "save" in setting:  # the adapter is a step behind what it is now: train no more
        shape = AdapterConfig(rank=4, alpha=8, activated=form.activated)
        write_adapter(Path(setting["save"]) / DIRECTORY, saved, shape, options["model"], (form.lead, "<conf>"))
        measured["last"] = [last[i] for i in range(len(samples))]
    measured["weights"] = [digest(p) for gpt in policy.gpt for p in gpt.parameters()]
    return measured


def run(options: dict[str, Any]) -> Any:
    topology = initialize_layout(ParallelConfig(**options["settings"][0]["parallel"]))
    return [measure(setting, options, topology) for setting in options["settings"]]
