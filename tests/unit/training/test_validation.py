"""HeldOutValidator alone: it returns what it found, and changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.training import held_out_validator
from megatron_dcpo.training.generation import Generation
from megatron_dcpo.training.held_out_validator import HeldOutValidator
from megatron_dcpo.types import Prompt
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import Clockwork, length_of, one_rank, unwatched


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


class Forgetful(Clockwork):
    eos_token_ids = (0,)
    forgotten = 0

    def forget_prompts(self) -> None:
        self.forgotten += 1


def validator(engine: Any, interval: int = 2) -> HeldOutValidator:
    prompts = {f"p{n}": Prompt(f"p{n}", (), (1,), "1", "t") for n in range(3)}
    held_out: Any = SimpleNamespace(
        prompts=prompts,
        judged=lambda responses, eos_ids: list(responses),
        metrics=lambda samples: {"evaluation/t/n": float(len(samples))},
    )
    benchmark = f"evaluation.benchmarks=t={QUICKSTART / 'data' / 'heldout.jsonl'}"
    overrides = [benchmark, f"evaluation.interval={interval}", "evaluation.samples=2"]
    config = load_config(QUICKSTART / "dcpo.yaml", [*overrides, "training.steps=5"])
    watch: Any = None
    generation = Generation(engine, Collectives(), watch)
    return HeldOutValidator(held_out, generation, unwatched(), config)


def test_it_returns_metrics_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    responses: list[Any] = []
    monkeypatch.setattr(
        held_out_validator, "write_samples", lambda samples, path: responses.extend(samples)
    )
    engine = Forgetful()
    validation = validator(engine).validate()
    assert validation is not None
    assert validation.metrics == {"evaluation/t/n": 6.0}
    validation.write(Path())
    assert [response.key for response in responses] == [
        (f"p{n}", index) for n in range(3) for index in range(2)
    ]
    assert all(len(r.token_ids) == length_of(*r.key) for r in responses)
    assert engine.forgotten == 1, "the prefix cache would change the next rollout by a rounding"


def test_it_is_due_at_its_interval_before_the_first_and_after_the_last_step() -> None:
    due = validator(Forgetful())
    assert [step for step in range(6) if due.is_due(step)] == [0, 2, 4, 5]


def test_a_signal_cuts_it_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "stop_requested", lambda: 15)
    assert validator(Forgetful()).validate() is None
