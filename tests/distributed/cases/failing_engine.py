"""``train`` with the embedded engine made to fail: ``mode`` is the name of the failure.

On several ranks only the last one's engine fails, and a restart is a collective of all ranks, as it
is with vLLM (``ExecutorWithExternalLauncher.determine_available_memory``).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcpo import cli
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.device import DeviceLost
from megatron_dcpo.runtime.watchdog import Watchdog
from megatron_dcpo.training import run as training_run
from megatron_dcpo.training import weight_sync
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import FEW_PROBLEMS

_PLACE = (("RANK", "0"), ("WORLD_SIZE", "1"))


class Failures:
    """Counts calls and fails on the ones the mode names."""

    def __init__(self, mode: str, message: str = "") -> None:
        self.message = message
        self.rank, self.world_size = (
            int(os.environ.get(name, default)) for name, default in _PLACE
        )
        self.mode = mode if self.rank == self.world_size - 1 else "none"
        self.generated = self.updated = self.restarted = self.handed_over = 0
        self.asked = []  # how many samples, call by call

    def install(self) -> None:
        stream, update, not_finite = (
            TransformersEngine.stream,
            TransformersEngine.update_weights,
            weight_sync.not_finite,
        )

        def failing_stream(engine, samples, sampling, step=0, **options):
            self.generated += 1
            self.asked.append(len(samples))
            if self.mode == "always" or (self.mode == "generate" and self.generated == 2):
                raise EngineError("killed in generation")
            if self.mode == "device" and self.generated == 2:
                raise RuntimeError(
                    self.message or "CUDA error: an illegal memory access was encountered"
                )
            parts = stream(engine, samples, sampling, step, **options)
            if self.mode == "signal" and step == 3:
                next(parts)
                os.kill(os.getpid(), signal.SIGTERM)
                while (
                    not signals.stop_requested()
                ):  # a thread notes it, which a busy machine may keep waiting
                    time.sleep(0.001)
            if self.mode == "shuffled":
                parts = [[response] for responses in parts for response in responses]
                random.Random(step).shuffle(parts)
            for responses in parts:
                if self.mode == "stale" and step == 2:
                    responses = [
                        replace(response, weights_version=response.weights_version - 1)
                        for response in responses
                    ]
                yield responses
                if self.mode == "midway" and self.generated == 2:
                    self.handed_over = len(responses)
                    raise EngineError("killed in generation")

        def failing_update(engine, buckets, version):
            self.updated += 1
            if self.mode == "update" and self.updated == 2:
                next(iter(buckets))
                raise EngineError("lost in the middle of an update")
            if self.mode == "wake" and self.updated == 3:
                raise DeviceLost(
                    "vLLM could not wake up its kv_cache: RuntimeError: CUDA Error: out of memory "
                    "at ..."
                )
            if self.mode == "slow" and self.updated == 2:
                time.sleep(4)
            if self.mode == "corrupt" and self.updated == 2:
                buckets = _with_a_corrupted_bucket(buckets)
            update(engine, buckets, version)

        def restart(engine):
            self.restarted += 1
            if self.world_size > 1:
                met = torch.ones(1)
                dist.all_reduce(met)
                assert met.item() == self.world_size, "another collective was met"
            for parameter in engine.model.parameters():
                parameter.data.zero_()  # an engine that comes back has no weights

        TransformersEngine.stream, TransformersEngine.update_weights = (
            failing_stream,
            failing_update,
        )
        TransformersEngine.restart = restart
        if self.mode == "slow":
            training_run.Watchdog = partial(Watchdog, budget=1.0)
        if self.mode == "nan":
            weight_sync.not_finite = lambda policy: (
                not_finite(_poisoned(policy)) if self.updated == 2 else []
            )


def _poisoned(policy):
    policy.parameters(0)["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = float("nan")
    return policy


def _with_a_corrupted_bucket(buckets):
    """One column of the first tensor arrives wrong."""
    for number, bucket in enumerate(buckets):
        if number == 0:
            first = bucket[0]
            values = first.values.clone()
            values[:, 0] += 1.0
            bucket = [replace(first, values=values), *bucket[1:]]
        yield bucket


def run(options: dict[str, Any]) -> None:
    failures = Failures(options["mode"], options.get("message", ""))
    failures.install()
    words = ["train", "--config", str(QUICKSTART / "dcpo.yaml"), FEW_PROBLEMS]
    status = cli.main([*words, *options["overrides"]])
    print(f"restarted {failures.restarted} updated {failures.updated}", flush=True)
    print(f"asked {failures.asked} handed over {failures.handed_over}", flush=True)
    sys.exit(status)
