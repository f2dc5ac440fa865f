"""The tables of the test: fitted rows, metrics by hand and by enumeration, and what is published from the records alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from lab.grid import METHODS, Cell
from lab.results import read_archive, write_archive
from lab.testfigures import by_method, draw_curves
from lab.testgrid import CURVES, METHODS_OF_THE_TEST, HeldOutLab, curve, pack
from lab.testtables import (
    FITTED,
    METRICS,
    RECORDS,
    Records,
    agreement,
    band_of_problems,
    ladder,
    load,
    lookup,
    pass_at,
    skill,
    tables,
    utility,
    with_fitted,
)
from megatron_dcpo.calibration import ece, null_ece
from megatron_dcpo.errors import UserError
from tests.helpers.paths import REPOSITORY

PUBLISHED = REPOSITORY / "docs" / "lab"


def records(problem, correct, confidence, kind=None, answer=None) -> Records:
    n = len(problem)
    kinds = np.array(kind if kind is not None else ["2x1"] * n)
    answers = np.array(answer if answer is not None else ["1"] * n)
    return Records(
        np.array(problem), kinds, np.array(correct, float), np.array(confidence, float), np.zeros(n), answers
    )


def test_pass_at_k_is_the_mean_over_all_choices_of_k_responses() -> None:
    right = {0: [1, 0, 0, 1], 1: [0, 0, 0, 1], 2: [0, 0, 0, 0]}
    r = records([p for p in right for _ in range(4)], [y for rows in right.values() for y in rows], [0.5] * 12)
    for k in range(1, 5):
        expected = np.mean([np.mean([any(c) for c in combinations(rows, k)]) for rows in right.values()])
        assert pass_at(k, r) == pytest.approx(expected)


def test_skill_is_zero_for_the_lookup_and_one_for_the_truth() -> None:
    kind, y = ["2x1"] * 4 + ["3x2"] * 4, [1, 1, 1, 0, 0, 0, 1, 0]
    r = records(range(8), y, [0.75] * 4 + [0.25] * 4, kind)
    assert lookup(r)(r).tolist() == [0.75] * 4 + [0.25] * 4
    assert skill(r) == pytest.approx(0)
    assert skill(r.stating(r.correct)) == 1
    assert skill(r.stating(np.full(8, 0.5))) == pytest.approx(1 - 0.25 / (3 / 16))
    assert lookup(r)(records([0], [1], [0.5], ["4x1"])).tolist() == [0.5], "a new type: the mean of all"


def test_utility_and_agreement() -> None:
    r = records([0, 0, 0, 1], [1, 0, 1, 1], [0.9, 0.6, 0.2, math.nan], answer=["7", "8", "7", "7"])
    assert utility(r) == pytest.approx(0.0)  # +1 - 1, and two not answered
    assert agreement(r).tolist() == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize("alike", [False, True])
def test_band_of_problems_holds_what_is_calibrated(alike: bool) -> None:
    """About 93 of 100 calibrated policies, whether a problem's eight responses are right together or each for itself."""
    generator, problem, inside = np.random.default_rng(3), np.repeat(np.arange(300), 8), []
    for _ in range(100):
        p = np.repeat(generator.uniform(size=300), 8)
        luck = np.repeat(generator.uniform(size=300), 8) if alike else generator.uniform(size=2400)
        r = records(problem, luck < p, p)
        inside.append(ece(r.confidence, r.correct) <= band_of_problems(r, resamples=100))
    assert 86 <= sum(inside) <= 99
    assert (band_of_problems(r) > 1.5 * null_ece(r.confidence, resamples=100)) is alike


def test_the_ladder_compares_each_rung_on_the_pretrainings_that_have_both() -> None:
    coupled, decoupled = (
        {"test": records([0, 0, 1, 1], y, [0.5] * 4)} for y in ([0, 0, 0, 1], [1, 1, 0, 1])
    )  # problem 0: 0 and 2 right of 2, problem 1: the same
    both = {"coupled": coupled, "dcpo": decoupled, "coupled_mean": coupled}
    lines = ladder({1: [{"dcpo": decoupled}], 2: [both, {"dcpo": coupled}]})
    gaps = [100.0, 0.0]
    half = 1.96 * np.std(gaps, ddof=1) / math.sqrt(2)
    assert [line for line in lines if line.startswith("| DCPO")] == [
        f"| DCPO - coupled (w/o decoupling) | 2 | +50 ± {half:.3g} | +0 ± 0 |"
    ]
    assert ladder({1: [{"dcpo": decoupled}]}) == []


def archive(path: Path, policies: tuple[str, ...]) -> None:
    generator = np.random.default_rng(0)
    files = {}
    for policy in policies:
        for method in ("grpo", "adapter", "adapter_tokens"):
            for part, repeats in (("test", 8), ("ood", 8), ("heldout", 4), ("train", 4), ("decoding", 4)):
                lines = ["problem,correct,confidence,answer,logprob,token,tokens"]
                for problem in range(40):
                    for _ in range(repeats):
                        p = round(generator.beta(0.6, 0.4), 3)
                        y = int(generator.random() < p)
                        said = 0.9 if method == "grpo" else p
                        lines.append(f"{problem},{y},{said:.2f},{problem if y else 7},{math.log(p + 1e-3):.4g},0.9,12")
                files[f"{policy}/{method}/1/{part}.csv"] = ("\n".join(lines) + "\n").encode()
    write_archive(path, files)


def test_the_contract_is_written_from_the_records_alone(tmp_path) -> None:
    archive(tmp_path / RECORDS, ("large.1", "large.3", "llama.1"))
    result = tables(tmp_path / RECORDS, tmp_path)
    written = json.loads((tmp_path / "test.json").read_text())
    assert set(written) == {"best", "null_ece_95", "policies"}
    assert set(written["policies"]) == {"qwen3_3", "llama"}
    for policy, n in (("qwen3_3", 2), ("llama", 1)):
        methods = written["policies"][policy]
        trained = {"grpo", "adapter", "adapter_tokens"}
        assert set(methods) == trained | {
            "lookup",
            "consistency",
            "logprob",
            "adapter_isotonic",
            "adapter_tokens_isotonic",
        }
        assert all(set(row) == set(METRICS) and len(row["ece"]) == n for row in methods.values())
    assert result["best"] in ("logprob", *(name for name in methods if "adapter" in name)), (
        "not GRPO, which says .9 always"
    )
    grpo, fitted = (written["policies"]["qwen3_3"][name] for name in ("grpo", "logprob"))
    assert grpo["accuracy"] == fitted["accuracy"]
    assert np.mean(fitted["auroc"]) > 0.8 > np.mean(grpo["auroc"])
    with pytest.raises(UserError, match="no records"):
        load(tmp_path / "missing.tar.xz")


def test_a_fitted_row_never_sees_what_it_is_scored_on(tmp_path) -> None:
    """Test labels turned round change no confidence; those of one half of the validation problems only the other half's."""
    archive(tmp_path / RECORDS, ("large.1",))
    runs = load(tmp_path / RECORDS)["large", 1, 1]
    before = with_fitted(runs)
    flipped = {
        method: dict(run) | {"test": replace(run["test"], correct=1 - run["test"].correct)}
        for method, run in runs.items()
    }
    after = with_fitted(flipped)
    for name in FITTED:
        assert np.array_equal(before[name]["test"].confidence, after[name]["test"].confidence)
    r = runs["grpo"]["heldout"]
    even = r.problem % 2 == 0
    changed = replace(r, correct=np.where(even, 1 - r.correct, r.correct))
    half = dict(runs) | {"grpo": dict(runs["grpo"]) | {"heldout": changed}}
    again = with_fitted(half)["logprob"]["heldout"].confidence
    assert np.array_equal(again[even], before["logprob"]["heldout"].confidence[even])
    assert not np.array_equal(again[~even], before["logprob"]["heldout"].confidence[~even])


def test_cells_are_packed_as_they_were_judged(tmp_path) -> None:
    run = tmp_path / "cells" / "large.2" / "adapter" / "seed1"
    (run / "policy").mkdir(parents=True)
    (run / "policy" / "model.safetensors").touch()
    rows = [{"step": i, "reward/accuracy": i / 10, "length/mean": None} for i in range(20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {"correct": True, "confidence": None, "answer": "12", "token_confidence": 0.51234, "num_tokens": 9}
    for draw in ("test", "decoding", "unfinished"):
        folder = run / "responses" / "grpo" / draw
        folder.mkdir(parents=True)
        lines = [
            {"benchmark": "test", "prompt_id": "test/7", **said, **more} for more in ({}, {"token_confidence": None})
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if draw != "unfinished":
            (folder / "evaluation.json").write_text("{}")
    assert pack(tmp_path, tmp_path / "a.tar.xz") == 1
    files = read_archive(tmp_path / "a.tar.xz")
    assert set(files) == {
        f"large.2/{name}" for name in ("adapter/1/curve.csv", "grpo/1/test.csv", "grpo/1/decoding.csv")
    }
    assert files["large.2/grpo/1/test.csv"].decode().splitlines()[1:] == ["7,1,,12,,0.5123,9", "7,1,,12,,,9"]
    assert curve(run / "metrics.jsonl").decode().splitlines() == [
        ",".join(("step", *CURVES)),
        "9,0.45,nan,nan,nan,nan,nan",
        "19,1.45,nan,nan,nan,nan,nan",
    ]


def test_grpos_row_is_the_adapters_policy_without_the_adapter(tmp_path) -> None:
    assert set(METHODS_OF_THE_TEST) <= set(METHODS)
    grid = HeldOutLab(tmp_path)
    cell = Cell("large.1", "adapter", 1)
    ran: list[list[str]] = []
    object.__setattr__(grid, "_call", lambda run, command: ran.append(command))
    object.__setattr__(grid, "fingerprint", lambda cell: "x")
    assert grid.run_cell(cell)["method"] == "adapter"
    assert ran[0][0] == "train"
    without = [command for command in ran[1:] if command[-1] == "--no-adapter"]
    assert len(without) == 3
    assert len(ran) == 7
    assert {command[command.index("--model") + 1] for command in ran[1:]} == {str(grid.directory(cell) / "policy")}


@pytest.mark.skipif(not (PUBLISHED / RECORDS).is_file(), reason="no records of the test are published")
def test_the_published_tables_are_those_of_the_published_records(tmp_path) -> None:
    tables(PUBLISHED / RECORDS, tmp_path)
    for name in ("test.json", "test_tables.md"):
        assert (tmp_path / name).read_text() == (PUBLISHED / name).read_text()


def test_curves_are_drawn_from_the_published_records(tmp_path) -> None:
    runs = by_method(read_archive(PUBLISHED / RECORDS), "large")
    assert {len(runs[method]) for method in ("adapter_tokens", "dcpo", "dcpo_proper", "rlcr_authors")} == {5}
    assert [row["step"] for row in runs["dcpo"][0][:3]] == ["10", "20", "30"]
    draw_curves(PUBLISHED / RECORDS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 20_000
