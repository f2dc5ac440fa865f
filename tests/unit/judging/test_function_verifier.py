"""A user's verifier: three signatures, every kind of result, and whatever a function may do to the
run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import FREE, Attempt, Outcome
from megatron_dcpo.judging.function_verifier import FunctionVerifier, load_function
from megatron_dcpo.judging.verdicts import TooManyUnjudged, check_unjudged
from megatron_dcpo.training.step_metrics import verifier_metrics
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.judging import judge_many

pytestmark = pytest.mark.slow
FUNCTIONS = """
import asyncio, os, sys, time
import numpy as np

RESULTS = {
    "true": True, "one": 1, "half": 0.5, "numpy": np.float32(0.25), "mapping": {"score": 0.5, "steps": 3, "why": "x" * 900},
    "logs an error": {"score": 1, "error": 0.25}, "no error": {"score": 1, "error": None},
    "error alone": {"error": "down"}, "error and no score": {"score": None, "error": "down"},
    "large": {"score": 1, "n": 10 ** 400, "m": -10 ** 5000, "f": 1e308, "kept": 2 ** 70},
    "escapes": {"score": 1, "\\x1b[31mred" + "k" * 900: "\\x1b[2J" + "\\ud800" + "x" * 900},
    "nan": float("nan"), "none": None, "two": 2, "text": "yes", "list": [1.0, 0.0], "no score": {"right": 1},
}


def verify(response, answer, *, problem, **columns):
    print("noise on stdout")
    if response == "hang":
        time.sleep(60)
    if response == "spin":
        while True:
            pass
    if response == "raise":
        raise ValueError("bad\\nluck")
    if response == "fork":
        os.fork()
    if response == "memory":
        bytearray(3 << 30)
    if response == "leave":
        sys.exit(3)
    if response == "die":
        os._exit(3)
    if response == "read":
        sys.stdin.read()
    seen = [response, answer, problem, columns]
    return RESULTS.get(response, seen == ["own", ["a", 1], "P", {"data_source": "t", "level": 2}])


async def waits(response, answer):
    await asyncio.sleep(0.01)
    return response == answer


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float((data_source, solution_str, ground_truth, extra_info) == ("t", "s", "s", {"k": 1}))}


def reward(prompts, completions, level, **columns):
    return [float(p + c == "Ps" and n == 2) for p, c, n in zip(prompts, completions, level, strict=True)]


def reward_of_chats(completions, **columns):
    return [float(chat[0]["content"] == "s") for chat in completions]


def unknown(x, y):
    return True
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "my_reward.py"
    path.write_text(FUNCTIONS)
    return path


def verifier_of(file: Path, name: str, **options: Any) -> FunctionVerifier:
    return FunctionVerifier(f"{file}:{name}", JudgingConfig(test_seconds=2.0, **options))


@pytest.fixture(scope="module")
def verify(file: Path) -> Iterator[FunctionVerifier]:
    made = verifier_of(file, "verify")
    yield made
    made.pool.close()


def judged(verifier: FunctionVerifier, text: str, truth: str = "", **row: Any) -> Outcome | None:
    return verifier([Attempt(None, truth, text, row)])[0]


def one(verifier: FunctionVerifier, text: str, truth: str = "", **row: Any) -> Outcome:
    outcome = judged(verifier, text, truth, **row)
    assert outcome is not None
    return outcome


def test_what_a_verifier_returns_is_read(verify: FunctionVerifier, file: Path) -> None:
    """Without a threshold only a score of 1 is right; a graded one is the reward."""
    texts = ["true", "one", "half", "numpy", "mapping"]
    outcomes = [one(verify, text) for text in texts]
    assert [o.correct for o in outcomes] == [True, True, False, False, False]
    assert [o.logged["score"] for o in outcomes] == [1, 1, 0.5, 0.25, 0.5]  # type: ignore[index]
    assert outcomes[-1].logged == {"score": 0.5, "steps": 3, "why": "x" * 200}
    assert {o.score for o in outcomes} == {None}
    graded = verifier_of(file, "verify", graded=True, threshold=0.5)
    assert one(graded, "half")[:3] == (True, None, 0.5)
    assert one(graded, "numpy")[:3] == (False, None, 0.25)
    assert judged(graded, "none") is None


def test_an_error_beside_a_score_is_logged(verify: FunctionVerifier) -> None:
    """An entry without a value is not."""
    assert one(verify, "logs an error") == Outcome(True, None, None, {"score": 1.0, "error": 0.25})
    assert one(verify, "no error") == Outcome(True, None, None, {"score": 1.0})


def test_numbers_that_no_float_holds_are_logged_as_texts(verify: FunctionVerifier) -> None:
    outcome = one(verify, "large")
    assert outcome.correct
    assert outcome.logged is not None
    assert outcome.logged["kept"] == 2**70
    assert outcome.logged["n"] == "1" + "0" * 199
    assert outcome.logged["m"].startswith("an integer of 16610 bits")
    assert outcome.logged["f"] == "1e+308"
    judgement = Judgement("p", 1.0, 0.5, "ok", 1, 2, logged=outcome.logged)
    assert verifier_metrics([judgement] * 4)["verifier/kept"] == float(2**70)


def test_names_and_texts_are_printable_and_bounded(verify: FunctionVerifier) -> None:
    logged = one(verify, "escapes").logged
    assert logged is not None
    ((name, value),) = [item for item in logged.items() if item[0] != "score"]
    assert name.startswith(r"\x1b[31mredkkk")
    assert value.startswith(r"\x1b[2J\ud800xxx")
    assert (len(name), len(value)) == (200, 200)


@pytest.mark.parametrize(
    "text",
    [
        "error alone",
        "error and no score",
        "nan",
        "none",
        "two",
        "text",
        "list",
        "no score",
        "raise",
        "leave",
        "die",
        "memory",
        "hang",
        "spin",
    ],
)
def test_what_a_function_does_wrong_is_an_error_and_the_next_one_is_judged(
    verify: FunctionVerifier, text: str
) -> None:
    assert judged(verify, text) is None
    assert one(verify, "true").correct


@pytest.mark.parametrize("text", ["fork", "read"])
def test_what_does_no_harm(verify: FunctionVerifier, text: str) -> None:
    """A fork comes back twice, one of them is ended; standard input is empty."""
    assert one(verify, text).category is None
    assert [one(verify, text).correct for text in ("true", "half", "true")] == [True, False, True]


def test_each_signature_of_a_reward_is_called_as_its_trainer_does(
    file: Path, verify: FunctionVerifier
) -> None:
    row = {"data_source": "t", "level": 2}
    assert one(verify, "own", "ignored", **row, problem="P", answer=["a", 1]).correct
    assert one(verifier_of(file, "waits"), "s", answer="s").correct
    verl = verifier_of(file, "compute_score")
    assert one(verl, "s", answer="s", data_source="t", extra_info={"k": 1}).correct
    assert one(verifier_of(file, "reward"), "s", problem="P", level=2).correct
    assert one(
        verifier_of(file, "reward_of_chats"), "s", prompt=[{"role": "user", "content": "P"}]
    ).correct
    with pytest.raises(UserError, match=r"unknown: .*verify\(response, answer, .*\(x, y\)"):
        load_function(f"{file}:unknown")


def test_one_warning_with_the_line(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    verifier = verifier_of(file, "verify")
    with caplog.at_level(logging.WARNING):
        assert [judged(verifier, text) for text in ("raise", "nan")] == [None, None]
    (said,) = caplog.messages
    assert f"ValueError: bad luck ({file}, line 23, in verify)" in said


def test_it_sees_the_reasoning_block_only(file: Path) -> None:
    """Whatever is written behind the marker cannot change R; without a box the response has an
    answer.
    """
    response = Response("p", 0, (), [], "stop", 0, text="true<conf> 0.9 half")  # type: ignore[arg-type]
    prompt = Prompt("p", (), (), "", "t", row={})
    verdict = judge_many(
        [response], {"p": prompt}, verifier=verifier_of(file, "verify"), form=FREE
    )[0]
    assert verdict is not None
    assert (verdict.correct, verdict.status, verdict.answered, verdict.R) == (
        1.0,
        "trailing_text",
        True,
        1.0,
    )


def judgement(category: str | None, logged: dict[str, Any] | None) -> Judgement:
    return Judgement("p", 0.0, None, "missing", 0, 0, category=category, logged=logged)


def test_only_so_many_responses_may_lack_a_judgement() -> None:
    check_unjudged(1, 4, 0.25, "step 1")
    check_unjudged(0, 0, 0.25, "step 1")
    with pytest.raises(TooManyUnjudged, match=r"1 of 4 .*step 1.*judging\.max_error_rate=0\.2"):
        check_unjudged(1, 4, 0.2, "step 1")
    with pytest.raises(TooManyUnjudged, match=r"4 of 4"):
        check_unjudged(4, 4, 1.0, "step 1")


def test_the_numbers_that_a_verifier_logs_are_averaged() -> None:
    math, fine, other = (
        judgement(None, None),
        judgement(None, {"score": 0.5, "n": 2}),
        judgement(None, {"score": 0.0}),
    )
    assert verifier_metrics([math, fine, other]) == {"verifier/score": 0.25, "verifier/n": 2.0}
    assert verifier_metrics([math]) == {}
