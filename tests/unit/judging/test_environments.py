"""The scores of environments of others: rewards and their range, errors, limits, what is seen of a
response, and what judging again reads.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_dcpo.config import JudgingConfig, SourceConfig
from megatron_dcpo.data.datasets import load_records
from megatron_dcpo.evaluation.problems import load_problems
from megatron_dcpo.judging.answers import FREE, Attempt, Outcome
from megatron_dcpo.judging.source_verifiers import verifier_of
from megatron_dcpo.judging.verifiers import check_verifier, digest_of, form_of, is_users, verifiers
from megatron_dcpo.judging.worker_pool import WorkerNotStarted
from megatron_dcpo.types import VERIFIER_ERROR, Prompt, Response
from tests.helpers.environments import LETTERS, STAND_INS, use_stand_ins

SUMS = "verifiers:sums-env"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)


def judged(
    path: str, texts: Sequence[str], options: JudgingConfig | None = None, at: int = 0
) -> list[Outcome]:
    record = load_records(path)[at]
    verifier, form = verifiers(options or JudgingConfig(), {})(path)
    assert form is FREE
    return list(verifier([Attempt(None, record.answer, text, record.row) for text in texts]))


def test_the_weighted_reward_is_the_score_and_its_parts_are_logged() -> None:
    """Reward 1.0 * right + 0.5 * brief in the declared range of 0 to 1.5."""
    options = JudgingConfig(graded=True, threshold=0.6)
    long = "a long text that ends with => 2"
    path = f"{SUMS}?weights=[1,0.5]&range=0..1.5"
    full, most, least = judged(path, ["=> 2", long, "=> 3"], options)
    assert full.logged == {"score": 1.0, "reward": 1.5, "right": 1.0, "brief": 1.0, "noisy": 0.0}
    assert (most.score, most.correct) == (pytest.approx(1 / 1.5), True)
    assert (least.score, least.correct) == (pytest.approx(0.5 / 1.5), False)


def test_errors_are_no_rewards(caplog: pytest.LogCaptureFixture) -> None:
    """What the rubric turns into 0 is an error here, and so are a reward out of range, a hang and
    the death of the process; the others are scored all the same. The first one is logged.
    """
    texts = ["=> 2", "raise", "2.5", "hang", "die", "=> 3"]
    outcomes = judged(SUMS, texts, JudgingConfig(test_seconds=1.0))
    failed = [outcome.category == VERIFIER_ERROR for outcome in outcomes]
    assert failed == [False, True, True, True, True, False]
    assert [outcome.correct for outcome in outcomes] == [True] + [False] * 5
    assert caplog.text.count("judging.verifier=") == 1
    assert "ValueError: cannot score this" in caplog.text
    assert "sums_env.py" in caplog.text


def test_a_reward_out_of_range_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    assert judged(SUMS, ["2.5"])[0].category == VERIFIER_ERROR
    assert "range=LOW..HIGH" in caplog.text


def test_a_python_that_has_gone_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    verifier, _ = verifiers(JudgingConfig(), {})(f"{SUMS}?python={python}")
    python.unlink()
    row = {"environment": {"input": {}}}
    with pytest.raises(WorkerNotStarted, match=str(python)):
        verifier([Attempt(None, "", "=> 2", row)])


def test_a_python_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.write_text("print()")
    file.chmod(0o755)
    verifier, _ = verifiers(JudgingConfig(), {})(f"{SUMS}?python={file}")
    with pytest.raises(WorkerNotStarted, match=str(file)):
        verifier([Attempt(None, "", "=> 2", {"environment": {"input": {}}})])


def test_an_environment_that_has_gone_is_one_line() -> None:
    verifier, _ = verifiers(JudgingConfig(), {})("verifiers:gone-env")
    with pytest.raises(WorkerNotStarted, match="gone-env") as refused:
        verifier([Attempt(None, "", "", {"environment": {"input": {}}})])
    assert "\n" not in str(refused.value)


def test_rewards_of_tasks() -> None:
    """Reward 2 * repeated - shouted, from -1 to 2."""
    path = "verifiers:tasks_env?size=1&range=-1..2"
    right, wrong, loud = judged(path, ["train0", "train1", "NO"])
    assert right.logged == {"score": 1.0, "reward": 2.0, "repeated": 1.0, "shouted": 0.0}
    assert [o.logged["score"] for o in (wrong, loud) if o.logged] == [1 / 3, 0.0]


def test_rewards_of_resource_servers_with_their_own_configuration() -> None:
    path = f"nemo_gym:letters?data={LETTERS}"
    right, unknown, wrong = judged(path, ["[B]", "[idk]", "[A]"])
    assert right.logged == {"score": 1.0, "said": "[B]"}
    assert (right.correct, unknown.correct, wrong.correct) == (True, False, False)
    assert unknown.logged == {"score": 0.25, "said": "[idk]"}
    (other,) = judged(f"{path}&part_of_reward=0.5", ["[idk]"])
    assert other.logged == {"score": 0.5, "said": "[idk]"}


def test_the_environment_sees_the_reasoning_block_only() -> None:
    """The stand-in's reward function fails if it sees the confidence."""
    (problems,) = load_problems(f"{SUMS}?size=1", JudgingConfig())
    record = problems.benchmark.records[0]
    prompt = Prompt(
        prompt_id=record.prompt_id,
        messages=record.messages,
        token_ids=(),
        ground_truth=record.answer,
        task=record.task,
        row=record.row,
        form=record.form,
    )
    response = Response(
        prompt_id=record.prompt_id,
        sample_index=0,
        weights_version=0,
        token_ids=(),
        logprobs=(),
        finish_reason="stop",
        text="=> 200\n<conf> Confidence: 0.987654",
    )
    (judgement,) = problems.judge([response], {record.prompt_id: prompt})
    assert (judgement.correct, judgement.category) == (1.0, None)
    assert judgement.confidence == 0.987654


def test_a_source_is_judged_by_its_environment_or_by_a_verifier_of_the_user() -> None:
    source = SourceConfig(path=SUMS, options={"tests": 3})
    assert verifier_of(source, JudgingConfig()) == f"{SUMS}?tests=3"
    own = SourceConfig(path=SUMS, verifier="my.py:f")
    assert verifier_of(own, JudgingConfig()) == "my.py:f"
    (problems,) = load_problems(f"sums={SUMS}?size=1", JudgingConfig(), [source])
    assert problems.verifier == f"{SUMS}?size=1"
    assert is_users(SUMS)
    check_verifier(SUMS)
    assert form_of(SUMS) is FREE


def test_a_digest_differs_with_the_configuration_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(STAND_INS / "resources_servers", tmp_path / "resources_servers")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{STAND_INS}")
    path = f"nemo_gym:letters?data={LETTERS}"
    one = digest_of(path, JudgingConfig())
    file = tmp_path / "resources_servers" / "letters" / "configs" / "letters.yaml"
    file.write_text(file.read_text().replace("0.25", "0.75"))
    assert digest_of(path, JudgingConfig()) != one


def test_a_digest_differs_with_the_scores_alone() -> None:
    options = JudgingConfig()
    one = digest_of(SUMS, options)
    assert digest_of(f"{SUMS}?size=1&part=eval", options) == one
    assert digest_of(f"{SUMS}?weights=[1,0]", options) != one
    assert digest_of("verifiers:setup_env", options) != digest_of("verifiers:turns_env", options)
