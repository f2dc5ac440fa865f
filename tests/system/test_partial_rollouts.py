"""``rollout.max_staleness``: a rollout ends when its batch is full, and the next step goes on with what is unfinished."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import EXIT_REQUEUE, UserError
from megatron_dcpo.rollout.engine import joined
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training import sampling
from megatron_dcpo.training.groups import Group, restored_groups, saved_groups
from megatron_dcpo.training.run import RunState
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.launch import alone
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SMALL, metrics, train, without_clocks

PARTIAL = (
    "rollout.max_staleness=1",
    "rollout.oversample=1.5",
    "objective.tis_level=token",
    "logging.samples_interval=1",
)
NAMES = ("rollout/carried", "rollout/staleness_mean", "rollout/staleness_max", "rollout/utilisation")


# ------------------------------------------------------------------------------------------------ the bookkeeping


def length_of(prompt_id: str, index: int) -> int:
    return max(1, round(random.Random(f"{prompt_id}/{index}").lognormvariate(1.5, 1.0)))


class Clockwork:
    """An engine that gives every response a token a step; a response ends at a length of its own."""

    tensor_model_parallel_size, slot_steps = 1, None

    def __init__(self) -> None:
        self.weights_version = 0
        self.asked: list[int] = []

    def stream(self, samples: Any, sampling: Any, step: int, partial: Any = None) -> Iterator[list[Response]]:
        self.asked.append(len(samples))
        begun = {(p.prompt_id, i): partial.so_far(p, i) if partial else None for p, i in samples}
        new = dict.fromkeys(begun, 0)

        def response(name: tuple[str, int], reason: Any) -> Response:
            before, count = begun[name], new.pop(name)
            first = len(before.token_ids) if before else 0
            parts = np.arange(first, first + count), np.zeros(count, np.float32)
            return joined(before, Response(*name, *parts, reason, self.weights_version, step=step))

        while new:
            new = {name: count + 1 for name, count in new.items()}
            over = [name for name in new if new[name] + len(getattr(begun[name], "token_ids", ())) >= length_of(*name)]
            if over:
                yield [response(name, "stop") for name in over]
            if partial is not None and partial.full():
                yield [response(name, "abort") for name in list(new)]


def clockwork_run(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Any:
    monkeypatch.setattr(sampling, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(sampling, "recover_engines", lambda *_, **__: False)
    monkeypatch.setattr(sampling, "stop_if_asked", lambda *_, **__: None)
    monkeypatch.setattr(sampling, "_trains", lambda run, group: group.position % 3 > 0)
    settings = ["data.prompts_per_step=6", "rollout.group_size=3", "objective.tis_level=token", *overrides]
    config = load_config(QUICKSTART / "grpo.yaml", settings)

    def judge(responses: Any, by_id: Any) -> list[Judgement]:
        return [Judgement(r.prompt_id, 1.0, 0.5, "ok", 1, len(r.token_ids)) for r in responses]

    prompts = [Prompt(str(i), (), (1,), "1", "t") for i in range(1000)]
    topology = SimpleNamespace(rank=0, world_size=1)
    return SimpleNamespace(
        config=config, prompts=prompts, progress=RunState(), topology=topology, engine=Clockwork(), judge=judge
    )


def take(run: Any, step: int) -> list[sampling.TrainingSample]:
    run.engine.weights_version = step - 1
    return sampling.sample_step(run, step, Timers(SimpleNamespace(enter=lambda phase, step: None)))  # type: ignore[arg-type]


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("oversample", [1.3, 2.0])
@pytest.mark.parametrize("filtered", [False, True])
def test_every_group_is_trained_on_once_and_in_time(
    monkeypatch: pytest.MonkeyPatch, staleness: int, oversample: float, filtered: bool
) -> None:
    options = [f"rollout.max_staleness={staleness}", f"rollout.oversample={oversample}"]
    run = clockwork_run(monkeypatch, *options, f"rollout.filter_groups={filtered}", "data.shuffle=false")
    trained: list[str] = []
    oldest = 0
    for step in range(1, 31):
        samples = take(run, step)
        assert len(samples) == 18
        batch = list(dict.fromkeys(sample.prompt.prompt_id for sample in samples))
        assert [s.response.sample_index for s in samples] == [0, 1, 2] * 6
        for sample in samples:
            response = sample.response
            assert len(response.token_ids) == length_of(response.prompt_id, response.sample_index)
            assert response.token_ids.tolist() == list(range(len(response.token_ids))), (
                "a token was lost or is there twice"
            )
            assert sum(n for _, n in response.segments or ((0, len(response.token_ids)),)) == len(response.token_ids)
            assert step - 1 - response.oldest_version <= staleness
            oldest = max(oldest, step - 1 - response.oldest_version)
        assert oldest >= run.progress.rollout["rollout/staleness_max"]
        trained += batch
        carried = {group.prompt.prompt_id for group in run.progress.carried}
        drawn = [f"{n}@0" for n in range(6 * step + run.progress.extra_prompts)]
        kept = [name for name in drawn if not filtered or int(name.split("@")[0]) % 3 > 0 or name in carried]
        assert sorted([*trained, *carried]) == sorted(kept), "a prompt was lost or is there twice"
        assert len(run.progress.carried) <= round(6 * (oversample - 1) + 0.5)
    assert oldest == staleness if staleness == 1 else oldest > 0


def test_longer_staleness_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound at work, a step lasts until the oldest response has ended."""
    means = []
    for staleness in (1, 3):
        run = clockwork_run(monkeypatch, f"rollout.max_staleness={staleness}", "rollout.oversample=1.5")
        stale = []
        for step in range(1, 21):
            take(run, step)
            stale.append(run.progress.rollout["rollout/staleness_max"])
        means.append(np.mean(stale))
    assert means[1] > means[0]


def test_with_none_the_batch_is_what_it_always_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt in the order of the data, every response by one version, nothing carried, no metric of it."""
    run = clockwork_run(monkeypatch, "data.shuffle=false")
    for step in (1, 2):
        samples = take(run, step)
        expected = [(f"{n}@0", i) for n in range(6 * step - 6, 6 * step) for i in range(3)]
        assert [(s.response.prompt_id, s.response.sample_index) for s in samples] == expected
        assert {(s.response.weights_version, s.response.segments) for s in samples} == {(step - 1, ())}
    assert run.engine.asked == [18, 18]
    assert (run.progress, run.progress.carried) == (RunState(), [])


def test_too_old_or_too_new_responses_are_refused() -> None:
    response = Response("p", 0, np.arange(3), np.zeros(3, np.float32), "stop", 5, segments=((3, 2), (5, 1)))
    sampling._check_versions([response], 5, 2)
    for version, bound in ((5, 1), (6, 3), (4, 2)):
        with pytest.raises(UserError, match=f"the policy is at {version}: the engine was not synchronized"):
            sampling._check_versions([response], version, bound)
    with pytest.raises(UserError, match="weights version 3, the policy is at 5"):
        sampling._check_versions([response], 5, 1)


def test_groups_come_back_from_a_checkpoint_as_they_were() -> None:
    prompt = Prompt("p@0", (), (1,), "1", "t")
    whole = Response("p@0", 0, np.arange(3), np.zeros(3, np.float32), "stop", 4, step=4, segments=((3, 2), (4, 1)))
    part = dataclasses.replace(whole, sample_index=1, finish_reason="abort")
    judgement = Judgement("p@0", float(np.float64(1)), None, "missing", 2, 3, answer="7")
    group = Group(prompt, 17, 4, 3, {0: (whole, judgement), 1: (part, None)})
    (back,) = restored_groups(saved_groups([group]), lambda position: {17: prompt}[position], 3)
    assert (back.position, back.step, back.unfinished) == (17, 4, [1, 2])
    assert back.responses[0][1] == judgement
    for index, (response, _) in group.responses.items():
        ours, theirs = dataclasses.asdict(back.responses[index][0]), dataclasses.asdict(response)
        assert all(np.array_equal(ours.pop(name), theirs.pop(name)) for name in ("token_ids", "logprobs"))
        assert ours == theirs
    saved = saved_groups([group])
    saved[0]["responses"][0][0]["logprobs"] = saved[0]["responses"][0][0]["logprobs"][:2]
    with pytest.raises(ValueError, match="3 tokens of p@0"):
        restored_groups(saved, lambda position: prompt, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.oversample=1"], "set rollout.oversample above 1, at most 2"),
        (["rollout.oversample=2.5"], "set rollout.oversample above 1, at most 2"),
        (["objective.tis_level=none"], "correct for it with objective.tis_level=token"),
        (["rollout.engine=server", "rollout.endpoint=http://x"], "does not go with rollout.engine=server"),
        (["rollout.logprob_diff_alarm=0.1"], "does not go with rollout.logprob_diff_alarm"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(QUICKSTART / "dcpo.yaml", [*PARTIAL, *overrides])


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("carried") / "run"
    train(run_dir, *PARTIAL, "training.steps=4")
    return run_dir


def test_a_run_carries_and_corrects(carried: Path) -> None:
    records = metrics(carried)
    assert all(record["rollout/carried"] > 0 for record in records)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1, 1]
    assert all(0 < record["rollout/staleness_mean"] < 1 for record in records[1:])
    assert all(0 < record["rollout/utilisation"] <= 1 for record in records)
    assert records[0]["tis_weight"] == pytest.approx(1, abs=1e-5)
    assert all(abs(record["tis_weight"] - 1) > 1e-5 for record in records[1:]), "old tokens have other weights"
    assert records[0]["engine/kl"] < 1e-9 < records[1]["engine/kl"]


def test_a_carrying_run_resumes_bit_for_bit(carried: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", *PARTIAL, "training.steps=2")
    records = train(tmp_path / "run", *PARTIAL, "training.steps=4", "--resume", "auto")
    assert without_clocks(records) == without_clocks(metrics(carried))
    for name in ("samples/step_000003.jsonl", "samples/step_000004.jsonl", "policy/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (carried / name).read_bytes(), name


def test_without_the_option_what_is_carried_is_not_thrown_away(carried: Path, tmp_path: Path) -> None:
    done = alone(
        "failing_engine", tmp_path, options("none", carried, "rollout.max_staleness=0", "rollout.oversample=1")
    )
    assert done.returncode == 2
    assert "the checkpoint of step 4 carries responses that the next step continues" in done.stderr
    done = alone("failing_engine", tmp_path, options("none", carried, "rollout.max_response_length=4"))
    assert done.returncode == 2
    assert "set rollout.max_response_length above that to resume" in done.stderr


def options(mode: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    settings = [f"run_dir={run_dir}", *SMALL, *PARTIAL, "training.steps=6", *overrides]
    return {"mode": mode, "overrides": ["--resume", "auto", *settings]}


def test_a_signal_in_the_rollout_loses_nothing(carried: Path, tmp_path: Path) -> None:
    done = alone("failing_engine", tmp_path, options("signal", tmp_path / "run", "training.steps=4"))
    assert done.returncode == EXIT_REQUEUE, done.stderr[-2000:]
    assert "stopped by SIGTERM after step 2 of 4, saved" in done.stderr
    records = train(tmp_path / "run", *PARTIAL, "training.steps=4", "--resume", "auto")
    assert without_clocks(records) == without_clocks(metrics(carried))


def test_an_engine_that_fails_goes_on_behind_what_was_finished(carried: Path, tmp_path: Path) -> None:
    done = alone("failing_engine", tmp_path, options("midway", tmp_path / "run", "training.steps=4"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "starts anew" in done.stderr
    for ours, single in zip(metrics(tmp_path / "run"), metrics(carried), strict=True):
        for name in ("reward/accuracy", "rollout/carried", "rollout/staleness_mean", "length/mean"):
            assert ours[name] == single[name], name
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-5)


def test_two_engines_carry_too_and_go_on_from_one(carried: Path, tmp_path: Path) -> None:
    """Each fills its half of the batch. What one engine carried, two continue."""
    train(tmp_path / "one", *PARTIAL, "training.steps=2")
    resumed = train(tmp_path / "one", *PARTIAL, "training.steps=4", "--resume", "auto", processes=2)
    assert without_clocks(resumed)[:2] == without_clocks(metrics(carried))[:2]
    for record in (*resumed[2:], *train(tmp_path / "two", *PARTIAL, "training.steps=3", processes=2)[1:]):
        assert all(np.isfinite(record[name]) for name in NAMES)
        assert (record["rollout/staleness_max"], record["rollout/carried"] > 0) == (1, True)
