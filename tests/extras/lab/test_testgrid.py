"""The test's cells: their commands, their archive, what a failure stops; statistics over runs. No
training.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from lab.results import crossed, interval, read_archive, rounded
from lab.testgrid import CURVES, METHODS, METHODS_OF_THE_TEST, Cell, Lab, cells, curve, pack
from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import resolve
from tests.helpers.evaluated import A_SAMPLE


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.trained])
def test_every_method_is_a_valid_configuration(tmp_path, method: str) -> None:
    command = Lab(tmp_path).train_command(Cell("qwen3", method, 3))
    if method.startswith("distilled"):  # lab.distilled names the teacher
        command.append("objective.teacher=teacher")
    config = load_config(command[2], [part for part in command[3:] if "=" in part])
    assert (config.seed, config.training.steps) == (3, 500)
    names = [o.split("=")[1] for o in METHODS[method].overrides if o.startswith("objective.name")]
    assert [resolve(config.objective).name] == (names or ["dcpo"])


def test_unknown_names_are_refused_with_the_nearest(tmp_path) -> None:
    assert set(METHODS_OF_THE_TEST) <= set(METHODS)
    assert [c.name for c in cells(["large.1", "large.2"], ["grpo"], [1])] == [
        "large.1/grpo/seed1",
        "large.2/grpo/seed1",
    ]
    with pytest.raises(UserError, match="did you mean 'dcpo_proper'"):
        cells(["large.1"], ["dcpo_propper"], [1])
    with pytest.raises(UserError, match=r"make_policies\.sh mistral"):
        Lab(tmp_path).train_command(Cell("mistral", "dcpo", 1))


def test_grpo_is_sampled_in_every_way_and_finished_cells_are_kept(tmp_path, monkeypatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(Lab, "call", lambda self, run, command: ran.append(command))
    lab, chosen = Lab(tmp_path, jobs=1), cells(["qwen3"], ["grpo", "dcpo", "base"], [1])
    lab.run(chosen)
    assert [command[0] for command in ran] == [
        "train",
        *["evaluate"] * 3,
        "train",
        "evaluate",
        "evaluate",
    ]
    models = [command[command.index("--model") + 1] for command in ran if command[0] == "evaluate"]
    assert models[:3] == [str(lab.directory(chosen[0]) / "policy")] * 3
    assert models[4].endswith("examples/lab/qwen3/policy")
    record = json.loads((lab.directory(chosen[0]) / "cell.json").read_text())
    assert (record["policy"], record["method"], record["seed"]) == ("qwen3", "grpo", 1)
    ran.clear()
    lab.run(chosen)
    assert not ran


def test_a_failed_cell_stops_no_other(tmp_path, monkeypatch) -> None:
    ran = []

    def run_cell(self: Lab, cell: Cell) -> dict:
        ran.append(cell.method)
        if cell.method == "grpo":
            raise UserError("out of luck")
        return {"seconds": 1.0}

    monkeypatch.setattr(Lab, "run_cell", run_cell)
    with pytest.raises(UserError, match="1 cells failed, the first qwen3/grpo/seed1: out of luck"):
        Lab(tmp_path, jobs=1).run(cells(["qwen3"], ["grpo", "dcpo", "coupled"], [1]))
    assert ran == ["grpo", "dcpo", "coupled"]


def test_cells_are_packed_as_they_were_judged(tmp_path) -> None:
    run = tmp_path / "cells" / "large.2" / "grpo" / "seed1"
    said = A_SAMPLE | {"correct": 1.0, "answer": "12", "token_confidence": 0.51234, "length": 9}
    for draw in ("test", "choosing", "unfinished"):
        folder = run / "responses" / draw
        folder.mkdir(parents=True)
        lines = [
            {**said, "prompt_id": "test/7", **more} for more in ({}, {"token_confidence": None})
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if draw != "unfinished":
            (folder / "evaluation.json").write_text("{}")
    rows = [{"step": i, "reward/accuracy": i / 10, "length/mean": None} for i in range(20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pack(tmp_path, tmp_path / "a.tar.xz") == 0, "not finished"
    (run / "cell.json").write_text("{}")
    assert pack(tmp_path, tmp_path / "a.tar.xz") == 1
    files = read_archive(tmp_path / "a.tar.xz")
    assert set(files) == {f"large.2/grpo/1/{name}.csv" for name in ("curve", "test", "heldout")} | {
        "large.2/grpo/1/cell.json"
    }
    assert files["large.2/grpo/1/test.csv"].decode().splitlines()[1:] == [
        "7,1,,12,,0.5123,9",
        "7,1,,12,,,9",
    ]
    assert curve(run / "metrics.jsonl").decode().splitlines() == [
        ",".join(("step", *CURVES)),
        "9,0.45,nan,nan,nan,nan,nan",
        "19,1.45,nan,nan,nan,nan,nan",
    ]


def test_interval_is_students() -> None:
    x = [0.1, 0.2, 0.4, 0.3, 0.25]
    low, high = stats.t.interval(0.95, 4, np.mean(x), stats.sem(x))
    found = interval(x)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert math.isnan(interval([0.5]).low)
    assert interval([0.5]).shown(2) == "+0.50"
    assert interval([-0.2, 0.2]).shown(1) == "+0.0 ± 2.5"


def test_crossed_interval_covers_new_runs_and_new_problems() -> None:
    """Of many drawn grids, the interval holds the truth as often as it says; the runs' alone far
    less often.
    """
    rng, covered, by_runs = np.random.default_rng(0), 0, 0
    for _ in range(600):
        x = rng.normal(0, 0.3, (5, 1)) + rng.normal(0, 3, 80) + rng.normal(0, 2, (5, 80))
        found, runs_only = crossed(x), interval(x.mean(axis=1))
        covered += found.low < 0 < found.high
        by_runs += runs_only.low < 0 < runs_only.high
    assert 0.92 < covered / 600 < 0.985
    assert by_runs / 600 < 0.9
    assert math.isnan(crossed(np.zeros((1, 9))).low)
    assert crossed(np.full((3, 9), 0.25)).high == 0.25


def test_rounding_keeps_six_digits() -> None:
    assert rounded({"a": [1 / 3, None, 7, "x"]}) == {"a": [0.333333, None, 7, "x"]}
