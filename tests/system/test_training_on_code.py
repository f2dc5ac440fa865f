"""``dcpo train`` on programming problems, and judging that overlaps generation."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.data.code_problems import pack_tests
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.programs import ProgramVerifier
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.sandbox.local import CodeLimits
from megatron_dcpo.training import sampling
from megatron_dcpo.training.groups import Group
from megatron_dcpo.training.run import build_run
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.coder import make_coder, problem_rows
from tests.helpers.paths import QUICKSTART
from tests.helpers.processes import below
from tests.helpers.quickstart import train, without_clocks


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_coder(tmp_path_factory.mktemp("coder"))


def train_on_code(run_dir: Path, coder: tuple[Path, Path], *overrides: str, **options: Any) -> list[dict[str, Any]]:
    policy, data = coder
    settings = [f"model.path={policy}", f"data.path={data}", "judging.verifier=code", "data.max_prompt_length=64"]
    settings += ["data.prompts_per_step=6", "rollout.max_response_length=80", "training.steps=2"]
    return train(run_dir, *settings, *overrides, **options)


@pytest.fixture(scope="module")
def two_steps(coder: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("code") / "run"
    return run_dir, train_on_code(run_dir, coder)


def test_two_steps_on_programs(two_steps: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, records = two_steps
    assert [record["step"] for record in records] == [1, 2]
    assert all(0 < record["reward/accuracy"] < 1 for record in records)
    assert all(record["grad_norm/reasoning"] > 0 for record in records[:1])
    assert all(record["time/judge_busy"] > 0 for record in records)
    samples = [json.loads(line) for line in (run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert {sample["correct"] for sample in samples} == {0.0, 1.0}
    for sample in samples:
        number = int(sample["problem"].removeprefix("f=").removesuffix("+7"))
        said = f"```python\ndef f():\n return {number + 7}\n```"
        assert sample["correct"] == float(sample["reasoning"].strip() == said), sample
        assert sample["ground_truth"].startswith("tests:"), "megabytes of tests are not copied into every sample"
        if sample["status"] == "ok":
            assert sample["reasoning"].endswith("```\n")
            assert sample["confidence_block"].startswith("<conf>")


def test_batches_and_ranks_change_nothing(
    two_steps: tuple[Path, list[dict[str, Any]]], coder: tuple[Path, Path], tmp_path: Path
) -> None:
    for name, overrides, processes in (("batches", ["rollout.max_num_seqs=7"], 1), ("ranks", [], 2)):
        records = train_on_code(tmp_path / name, coder, *overrides, processes=processes)
        for ours, single in zip(without_clocks(records), without_clocks(two_steps[1]), strict=True):
            assert ours["reward/accuracy"] == single["reward/accuracy"]
            assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("judging.verifier=math",), "6 programming problems; set judging.verifier=code"),
        ((f"data.path={QUICKSTART / 'data' / 'train.jsonl'}",), "have no tests"),
        (("judging.sandbox=nonsense",), "sandbox 'nonsense'"),
    ],
)
def test_what_cannot_be_judged_is_said_before_anything_is_built(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    data = tmp_path / "code.jsonl"
    data.write_text("\n".join(map(json.dumps, problem_rows())) + "\n")
    settings = [f"data.path={data}", "judging.verifier=code", f"model.path={QUICKSTART / 'policy'}", *overrides]
    with pytest.raises(UserError, match=message):
        build_run(load_config(QUICKSTART / "dcpo.yaml", [*settings, "data.max_prompt_length=64"]))


# ------------------------------------------------------------------------------------------------ overlap


def fake_run(judge: Any, stream: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sampling, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(sampling, "recover_engines", lambda *_, **__: False)
    config = load_config(QUICKSTART / "dcpo.yaml", ["rollout.group_size=2"])
    engine = SimpleNamespace(stream=stream, weights_version=0, tensor_model_parallel_size=1)
    return SimpleNamespace(config=config, topology=SimpleNamespace(rank=0, world_size=1), engine=engine, judge=judge)


def unwatched() -> Timers:
    return Timers(SimpleNamespace(enter=lambda phase, step: None))  # type: ignore[arg-type]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (), tuple(range(count - i)), "1", "t") for i in range(count)]


def response(prompt: Prompt, index: int) -> Response:
    return Response(prompt.prompt_id, index, np.array([1]), np.zeros(1, np.float32), "stop", 0)


def one_by_one(samples: Any, sampling: Any, step: int) -> Iterator[list[Response]]:
    for prompt, index in samples:
        yield [response(prompt, index)]


def judged(responses: list[Response], by_id: Any) -> list[Judgement]:
    return [Judgement(r.prompt_id, float(r.sample_index), None, "missing", 0, 1) for r in responses]


def roll_out(run: Any, step: int = 1, timers: Timers | None = None, count: int = 7) -> list[sampling.TrainingSample]:
    rollout = sampling.Rollout()
    groups = [Group(prompt, n, step, 2) for n, prompt in enumerate(prompts(count))]
    sampling.roll_out(run, groups, count, step, rollout)
    judged = sampling.gather_judged(run, groups, rollout, timers or unwatched())
    return [sample for group in judged for sample in sampling._samples(group)]


def test_a_response_is_judged_while_the_next_one_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither can go on without the other: the test would time out if one waited for the end of the other. The judge of
    the first response holds up nobody else's either."""
    generating, judging, last = threading.Event(), threading.Event(), threading.Event()

    def stream(samples: Any, sampling: Any, step: int) -> Iterator[list[Response]]:
        for number, (prompt, index) in enumerate(samples):
            if number == 1:
                generating.set()
                assert judging.wait(30), "the first response is not judged meanwhile"
            yield [response(prompt, index)]

    def judge(responses: list[Response], by_id: Any) -> list[Judgement]:
        if (responses[0].prompt_id, responses[0].sample_index) == ("p0", 0):
            judging.set()
            assert generating.wait(30), "the second response is not generated meanwhile"
            assert last.wait(30), "a slow response holds up the others"
        if (responses[0].prompt_id, responses[0].sample_index) == ("p6", 1):
            last.set()
        return judged(responses, by_id)

    timers = unwatched()
    rollout = roll_out(fake_run(judge, stream, monkeypatch), timers=timers)
    assert [(s.response.prompt_id, s.response.sample_index) for s in rollout] == [
        (f"p{i}", n) for i in range(7) for n in (0, 1)
    ]
    assert [s.judgement.correct for s in rollout] == [0.0, 1.0] * 7
    assert timers.seconds["judge_busy"] > 0


def test_a_judge_that_fails_ends_the_rollout_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    generated = []

    def judge(responses: Any, by_id: Any) -> Any:
        try:
            raise UserError("no sandbox")
        finally:
            failed.set()

    def stream(samples: Any, sampling: Any, step: int) -> Iterator[list[Response]]:
        for prompt, index in samples:
            yield [response(prompt, index)]
            generated.append(index)
            assert failed.wait(30)
            time.sleep(0.2)  # from the exception to the future

    with pytest.raises(UserError, match="no sandbox"):
        roll_out(fake_run(judge, stream, monkeypatch))
    assert len(generated) < 14
    with pytest.raises(UserError, match="weights version 0, the policy is at 3"):
        roll_out(fake_run(judged, one_by_one, monkeypatch), step=4)


def test_ranks_of_one_engine_keep_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two was handed three responses before its engine failed; its mate has another one, and one alike."""
    run = fake_run(judged, one_by_one, monkeypatch)
    run.engine.tensor_model_parallel_size, run.topology.world_size = 2, 4
    responses = {("p0", i): response(prompts(1)[0], i) for i in range(3)}
    alike = {name: hashlib.sha256(one.token_ids.tobytes()).digest() for name, one in responses.items()}
    mate = {("p0", 0): alike[("p0", 0)], ("p0", 1): b"other tokens"}
    monkeypatch.setattr(sampling, "all_gather_objects", lambda own: [own, mate, {}, {}])
    assert list(sampling._agreed(run, responses)) == [("p0", 0)]


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0.0), ([(1, 2)], 1.0), ([(1, 3), (2, 4), (6, 7)], 4.0), ([(0, 9), (1, 2), (3, 4)], 9.0)],
)
def test_the_time_of_a_busy_judge_counts_once(intervals: list[tuple[float, float]], length: float) -> None:
    assert sampling.covered(intervals) == length


# ------------------------------------------------------------------------------------------------ dead sandboxes


def test_a_killed_sandbox_is_replaced_and_its_program_judged_again() -> None:
    tests = {"kind": "stdin", "cases": [{"input": "", "output": "ok\n"}]}
    packed = {"tests:a": pack_tests(tests)}
    slow = "import time\ntime.sleep(1.5)\nprint('ok')"
    quick, wrong = slow.replace("1.5", "0"), slow.replace("'ok'", "'no'")
    before = set(below(os.getpid()))
    judge = ProgramVerifier(packed, CodeLimits(), workers=2)
    assert [v.correct for v in judge([(quick, "tests:a")] * 2)] == [True, True]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(judge([(slow, "tests:a"), (wrong, "tests:a")])))
    thread.start()
    time.sleep(0.7)
    for pid in set(below(os.getpid())) - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert [v.category for v in found[0]] == ["passed", "wrong"]
    assert [v.correct for v in judge([(quick, "tests:a"), (wrong, "tests:a")])] == [True, False]
    with pytest.raises(UserError, match="no tests for 'tests:b'"):
        judge([(quick, "tests:b")])
    judge.pool.close()
    assert set(below(os.getpid())) - before == set(), "nothing is left running"
