"""``dcpo train`` on programming problems."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.data.code_problems import pack_tests
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.programs import ProgramVerifier
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.training.run import build
from tests.helpers.coder import make_coder, problem_rows
from tests.helpers.paths import QUICKSTART
from tests.helpers.processes import below
from tests.helpers.quickstart import train, without_clocks


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_coder(tmp_path_factory.mktemp("coder"))


def train_on_code(
    run_dir: Path, coder: tuple[Path, Path], *overrides: str, **options: Any
) -> list[dict[str, Any]]:
    policy, data = coder
    settings = [
        f"model.path={policy}",
        f"data.path={data}",
        "judging.verifier=code",
        "data.max_prompt_length=64",
    ]
    settings += ["data.prompts_per_step=6", "rollout.max_response_length=80", "training.steps=2"]
    return train(run_dir, *settings, *overrides, **options)


@pytest.fixture(scope="module")
def two_steps(
    coder: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("code") / "run"
    return run_dir, train_on_code(run_dir, coder)


def test_two_steps_on_programs(two_steps: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, records = two_steps
    assert [record["step"] for record in records] == [1, 2]
    assert all(0 < record["reward/accuracy"] < 1 for record in records)
    assert all(record["grad_norm/total"] > 0 for record in records[:1])
    assert all(record["time/judge_busy"] > 0 for record in records)
    samples = [
        json.loads(line)
        for line in (run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert {sample["correct"] for sample in samples} == {0.0, 1.0}
    for sample in samples:
        number = int(sample["problem"].removeprefix("f=").removesuffix("+7"))
        said = f"```python\ndef f():\n return {number + 7}\n```"
        reasoning, confidence = (
            "".join(text for text, block, _ in sample["pieces"] if block == name)
            for name in ("reasoning", "confidence")
        )
        assert sample["correct"] == float(reasoning.strip() == said), sample
        assert sample["ground_truth"].startswith("tests:"), (
            "megabytes of tests are not copied into every sample"
        )
        if sample["status"] == "ok":
            assert reasoning.endswith("```\n")
            assert confidence.startswith("<conf>")


def test_batches_and_ranks_change_nothing(
    two_steps: tuple[Path, list[dict[str, Any]]], coder: tuple[Path, Path], tmp_path: Path
) -> None:
    for name, overrides, processes in (
        ("batches", ["rollout.max_num_seqs=7"], 1),
        ("ranks", [], 2),
    ):
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
    settings = [
        f"data.path={data}",
        "judging.verifier=code",
        f"model.path={QUICKSTART / 'policy'}",
        *overrides,
    ]
    config = load_config(QUICKSTART / "dcpo.yaml", [*settings, "data.max_prompt_length=64"])
    with pytest.raises(UserError, match=message), build(config):
        pass


# ----------------------------------------------------------------------------------- dead sandboxes


def test_a_killed_sandbox_is_replaced_and_its_program_judged_again() -> None:
    tests = {"kind": "stdin", "cases": [{"input": "", "output": "ok\n"}]}
    packed = {"tests:a": pack_tests(tests)}
    slow = "import time\ntime.sleep(1.5)\nprint('ok')"
    quick, wrong = slow.replace("1.5", "0"), slow.replace("'ok'", "'no'")
    before = set(below(os.getpid()))
    judge = ProgramVerifier(packed, CodeLimits(), workers=2)
    assert [v.correct for v in judge([Attempt(quick, "tests:a")] * 2)] == [True, True]
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(judge([Attempt(slow, "tests:a"), Attempt(wrong, "tests:a")]))
    )
    thread.start()
    time.sleep(0.7)
    # parents first: a supervisor that outlives its program reports the program's end as a verdict
    for pid in _parents_first(set(below(os.getpid())) - before):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert [v.category for v in found[0]] == ["passed", "wrong"]
    assert [v.correct for v in judge([Attempt(quick, "tests:a"), Attempt(wrong, "tests:a")])] == [
        True,
        False,
    ]
    with pytest.raises(UserError, match="no tests for 'tests:b'"):
        judge([Attempt(quick, "tests:b")])
    judge.pool.close()
    assert set(below(os.getpid())) - before == set(), "nothing is left running"


def _parents_first(pids: set[int]) -> list[int]:
    """``pids`` by the number of their ancestors; those that have ended are left out."""
    depth = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            depth[pid] = len(psutil.Process(pid).parents())
    return sorted(depth, key=depth.__getitem__)
