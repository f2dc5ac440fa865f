"""Tables of the real model from samples that are made here: what is right, what is fitted where,
what is said of nothing.
"""

from __future__ import annotations

import json
import runpy
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Sample, write_samples
from tests.helpers.evaluated import changed, make_sample
from tests.helpers.paths import EXAMPLES, REPOSITORY

study = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "smollm2" / "study.py")))


def samples(seed: int, shift: float, problems: int = 40) -> list[Sample]:
    """Responses whose log-prob tells how likely they are right, and whose stated confidence is that
    plus ``shift``.
    """
    rng, made = np.random.default_rng(seed), []
    for problem in range(problems):
        p = rng.uniform(0.05, 0.95)
        for repeat in range(4):
            right, c = rng.random() < p, float(np.clip(p + shift, 0, 1).round(2))
            answer = "7" if right else str(rng.integers(20, 25))
            made.append(
                make_sample(
                    task="test",
                    prompt_id=f"p{problem}",
                    sample_index=repeat,
                    kind=f"task{problem % 2} {problem % 3}",
                    answer=answer,
                    ground_truth="7",
                    correct=float(right),
                    confidence=c,
                    status="ok",
                    boundary=5,
                    length=9,
                    reasoning_logprob=float(np.log(p)),
                )
            )
    return made


@pytest.fixture
def runs(tmp_path):
    for method, shift in (("base", 0.3), ("grpo", 0.0)):
        for seed, part in enumerate(("test", "validation", "ood")):
            (tmp_path / "runs" / method / part).mkdir(parents=True)
            write_samples(samples(seed, shift), tmp_path / "runs" / method / part / "samples.jsonl")
    steps = [
        {
            "step": n,
            "reward/accuracy": 0.1 * n,
            "rollout/prompts_drawn": 20,
            "rollout/groups_filtered": 4,
            **dict.fromkeys(study.STEPS[1:], 0.5),
        }
        for n in range(10)
    ]
    (tmp_path / "runs" / "grpo" / "metrics.jsonl").write_text(
        "".join(json.dumps(s) + "\n" for s in steps)
    )
    return tmp_path / "runs"


def test_tables_come_from_the_archive_alone(runs, tmp_path):
    archive = tmp_path / study.RECORDS
    assert study.pack(runs, archive) == 7
    text = study.tables(archive, tmp_path, tmp_path)
    assert text == (tmp_path / "real_model_tables.md").read_text()
    rows = {
        line.split(" | ")[0][2:]: line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| ")
    }
    assert float(rows["before RL: stated"][1].split()[0]) > 0.15, "over-confident by .3"
    assert float(rows["before RL: stated, isotonic"][1].split()[0]) < 0.15
    assert float(rows["GRPO: stated"][1].split()[0]) < 0.15
    assert rows["GRPO, last 5 of 10"][1] == "0.700"
    assert "| GRPO | 1600 | 160 | 160 |" in text, "8 responses to each of 200 prompts"
    assert rows["GRPO: " + study.LOOKUP][6].startswith("0.000"), "skill 0 by definition"
    loaded = study.load(study.unpack(archive), tmp_path)
    right = np.array([float(s.correct) for s in loaded["grpo"]["test"]])
    found = study.resampled(
        study.records(loaded["grpo"]["test"], right), lambda c, y: float(y.mean())
    )
    assert found[1] < right.mean() < found[2]


def test_agreement_leaves_the_response_itself_out():
    answers = ["1", "1", "2", "2", None]
    of = [make_sample(sample_index=i, answer=answer) for i, answer in enumerate(answers)]
    assert study.agreement(of) == pytest.approx([0.25] * 4 + [np.nan], nan_ok=True)


def test_the_lookup_never_sees_what_it_is_scored_on():
    """Labels of the test turned round change none of its confidences. Where problems of one kind
    are right half of the time, leaving out the problem itself gives an AUROC of 0, halves do not.
    """
    fitted, scored = samples(3, 0.0), samples(4, 0.0)
    before = study.looked_up(scored, fitted)
    turned = [changed(s, correct=1 - s.judgement.correct) for s in scored]
    assert np.array_equal(study.looked_up(turned, fitted), before)
    shares = {}
    for s in fitted:
        shares.setdefault(s.prompt.kind, []).append(s.correct)
    assert before.tolist() == pytest.approx([np.mean(shares[s.prompt.kind]) for s in scored])
    new = [changed(s, kind="another 9") for s in scored]
    assert set(study.looked_up(new, fitted)) == {np.mean([s.correct for s in fitted])}
    alike = [
        make_sample(prompt_id=f"p{i:02}", kind="k", correct=float(i % 4 < 2)) for i in range(40)
    ]
    assert set(study.looked_up(alike, alike)) == {0.5}


def test_a_gain_is_paired_by_problem_and_a_skill_has_its_interval():
    before, after = (
        [
            make_sample(prompt_id=f"p{i:02}", sample_index=n, correct=float(right))
            for i, right in enumerate(labels)
            for n in range(2)
        ]
        for labels in ([0, 0, 1, 1] * 10, [1, 0, 1, 1] * 10)
    )
    mean, low, high = study.gain(after, before)
    assert mean == 0.25
    assert 0.1 < low < mean < high < 0.4
    r = study.records(after, np.full(80, 0.75))
    assert study.skill(r, np.full(80, 0.75)) == (0, 0, 0)
    value, low, high = study.skill(r, np.full(80, 0.25))
    assert value == pytest.approx(1 - 0.1875 / 0.4375)
    assert low < value < high


def test_the_most_frequent_answer_is_a_share_of_all_responses():
    assert study.most_frequent(["1", None, "1", "2"]) == ("1", 0.5)


def test_without_records_one_line(tmp_path):
    with pytest.raises(UserError, match="no records"):
        study.unpack(tmp_path / "none.tar.xz")
    with pytest.raises(UserError, match=r"no METHOD/PART/samples\.jsonl"):
        study.pack(tmp_path, tmp_path / "out.tar.xz")


@pytest.mark.slow
@pytest.mark.full
def test_the_published_tables_are_those_of_the_published_records(tmp_path):
    published = REPOSITORY / "docs" / "lab"
    text = study.tables(published / study.RECORDS, tmp_path, tmp_path)
    assert text == (published / "real_model_tables.md").read_text()
