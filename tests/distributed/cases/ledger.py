"""``train`` as on a device with memory of its own: what leaves it loses its storage, an engine that
sleeps its weights.

``runtime.host_memory.ledger`` is watched: what was held together, and what was while something went
on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_dcpo.config import load_config
from megatron_dcpo.policy import optimizer
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime import host_memory
from megatron_dcpo.runtime.device import _CPU
from megatron_dcpo.training import checkpointer, loop, updater
from megatron_dcpo.training import run as training_run
from megatron_dcpo.training.updater import Updater
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import FEW_PROBLEMS

LEDGER = host_memory.ledger


class SleepingEngine(TransformersEngine):
    """Level 2 of vLLM's sleep: weights and cache are gone, and a version that was not handed over
    cannot sample.
    """

    failing = False

    def _drop(self) -> None:
        LEDGER.drop("engine cache")
        LEDGER.drop("engine weights")
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))

    sleep = restart = _drop

    def update_weights(self, buckets: Any, version: int) -> None:
        LEDGER.put("engine weights", sum(p.nbytes for p in self.model.parameters()))
        super().update_weights(buckets, version)
        LEDGER.put("engine cache", 1)

    def stream(self, samples: Any, sampling: Any, step: int = 0, partial: Any = None) -> Any:
        if SleepingEngine.failing and step == 2:
            SleepingEngine.failing = False
            raise EngineError("killed in generation")
        yield from super().stream(samples, sampling, step, partial)


def run(options: dict[str, Any]) -> Any:
    config = load_config(QUICKSTART / "dcpo.yaml", [FEW_PROBLEMS, *options["overrides"]])
    together, during = set(), {}

    def watch(name: str, owner: Any, attribute: str) -> None:
        function = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            during.setdefault(name, set()).add(" ".join(sorted(LEDGER.held)))
            return function(*args, **kwargs)

        setattr(owner, attribute, call)

    if options["device"]:
        for module in (host_memory, optimizer):
            module.capabilities = lambda: dataclasses.replace(_CPU, separate_memory=True)
        training_run.build_local_engine = lambda kind, model, settings: (
            SleepingEngine.from_pretrained(model, settings.dtype, settings.max_num_seqs)
        )
        SleepingEngine.failing = options.get("failing", False)
        LEDGER.watchers.append(lambda what, held: together.add(" ".join(sorted(held))))
        watch("engine built", training_run, "build_engine")
        watch("save", checkpointer, "checkpoint_state")
        watch("load", checkpointer, "load_checkpoint")
        watch("update", Updater, "update_once")
        watch("reference", updater, "logprobs_of")
        watch("rollout", SleepingEngine, "stream")
    Path(config.run_dir).parent.mkdir(parents=True, exist_ok=True)
    loop.train(config)
    return {
        "together": sorted(together),
        "during": {name: sorted(held) for name, held in during.items()},
    }
