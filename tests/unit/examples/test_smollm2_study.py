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
from tests.helpers.evaluated import make_sample
from tests.helpers.paths import EXAMPLES

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
            write_samples(
                samples(seed, shift),
                tmp_path / "runs" / method / part / "samples.jsonl",
            )
    steps = [
        {"step": n, "reward/accuracy": 0.1 * n, **dict.fromkeys(study.STEPS[1:], 0.5)}
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
    loaded = study.load(study.unpack(archive), tmp_path)
    right = np.array([float(s.correct) for s in loaded["grpo"]["test"]])
    found = study.resampled(
        study.records(loaded["grpo"]["test"], right), lambda c, y: float(y.mean())
    )
    assert found[1] < right.mean() < found[2]


def test_agreement_leaves_the_response_itself_out():
    answers = ["1", "1", "2", "2", None]
    of = [
        make_sample(sample_index=i, answer=answer) for i, answer in enumerate(answers)
    ]
    assert study.agreement(of) == pytest.approx([0.25] * 4 + [np.nan], nan_ok=True)


def test_without_records_one_line(tmp_path):
    with pytest.raises(UserError, match="no records"):
        study.unpack(tmp_path / "none.tar.xz")
    with pytest.raises(UserError, match=r"no METHOD/PART/samples\.jsonl"):
        study.pack(tmp_path, tmp_path / "out.tar.xz")
