"""The lab's bookkeeping: the grid, statistics over seeds, published cells, tables, bars. No training."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from lab.grid import MAIN, METHODS, SWEEP, Cell, grid, select
from lab.publish import ARCHIVE, render
from lab.results import apart, collect, crossed, interval, load_cells, read_archive, rounded, row_title, values_by_row
from lab.runner import EXAMPLES, FULL, SMOKE, Lab
from lab.tables import bars, claims, markdown_table, type_table
from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, Scored, as_method, build_objective, resolve
from megatron_dcpo.objectives.expected_digits import DecimalToken
from megatron_dcpo.training.probe import parts_of, without_regularizers
from megatron_dcpo.types import Judgement


def test_the_grid_has_every_method_with_its_seeds_and_starts_before_what_needs_them() -> None:
    cells = grid(range(1, 6))
    assert len(cells) == len(set(cells))
    for method in (*MAIN, *SWEEP):
        assert sum(c.method == method and c.family == "qwen3" for c in cells) == 5
    assert {c.family for c in cells} == {"qwen3", "llama", "large"}
    for cell in cells:
        if cell.needs:
            assert cells.index(cell.needs) < cells.index(cell), "or two waiting jobs could block each other"


def test_select_brings_the_start_along_and_names_the_nearest_method() -> None:
    cells = select(grid([1]), "posthoc")
    assert {c.method for c in cells} == {"posthoc", "grpo"}
    with pytest.raises(UserError, match="did you mean 'dcpo_proper'"):
        select(cells, "dcpo_propper")


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.kind == "train"])
def test_every_method_is_a_valid_configuration(tmp_path, method: str) -> None:
    command = Lab(tmp_path).train_command(Cell("qwen3", method, 3))
    config = load_config(command[2], [part for part in command[3:] if "=" in part])
    assert config.seed == 3
    assert resolve(config.objective).name == next(
        (o.split("=")[1] for o in METHODS[method].overrides if o.startswith("objective.name")), "dcpo"
    )
    named = [override for override in METHODS[method].overrides if override.startswith("optimizer.")]
    shared = load_config(EXAMPLES / "recipe.yaml", ["run_dir=x", *named])
    assert config.optimizer == shared.optimizer
    assert config.data.prompts_per_step == shared.data.prompts_per_step
    assert config.training.steps == round(FULL.steps * METHODS[method].share_of_steps)


def test_a_changed_recipe_is_another_cell(tmp_path) -> None:
    cell = Cell("qwen3", "dcpo", 1)
    assert Lab(tmp_path).fingerprint(cell) == Lab(tmp_path).fingerprint(cell)
    assert Lab(tmp_path).fingerprint(cell) != Lab(tmp_path, SMOKE).fingerprint(cell)
    assert Lab(tmp_path).fingerprint(cell) != Lab(tmp_path).fingerprint(Cell("qwen3", "dcpo_i", 1))
    with pytest.raises(UserError, match=r"make_policies\.sh mistral"):
        Lab(tmp_path).fingerprint(Cell("mistral", "dcpo", 1))


def test_a_failed_cell_stops_only_what_starts_from_it(tmp_path, monkeypatch) -> None:
    ran = []

    def run_cell(self: Lab, cell: Cell) -> dict:
        ran.append(cell.method)
        if cell.method == "grpo":
            raise UserError("out of luck")
        return record(cell.method, cell.seed, 0.1)

    monkeypatch.setattr(Lab, "run_cell", run_cell)
    cells = [Cell("qwen3", method, 1) for method in ("grpo", "posthoc", "confclass", "dcpo", "rlcr")]
    with pytest.raises(UserError, match="3 cells failed, the first qwen3/grpo/seed1"):
        Lab(tmp_path, jobs=2).run(cells)
    assert sorted(ran) == ["dcpo", "grpo", "rlcr"]


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch) -> None:
    lab, cell = Lab(tmp_path), Cell("qwen3", "dcpo", 1)
    lab.directory(cell).mkdir(parents=True)
    (lab.directory(cell) / "cell.json").write_text(json.dumps({"recipe": lab.fingerprint(cell)}))
    monkeypatch.setattr(Lab, "run_cell", lambda *_: pytest.fail("ran a finished cell"))
    lab.run([cell])
    assert not lab.finished(Cell("qwen3", "dcpo", 2))


def test_interval_is_students() -> None:
    x = [0.1, 0.2, 0.4, 0.3, 0.25]
    low, high = stats.t.interval(0.95, 4, np.mean(x), stats.sem(x))
    found = interval(x)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert math.isnan(interval([0.5]).low)
    assert apart(interval([0.1, 0.11, 0.12]), interval([0.5, 0.51, 0.52]))
    assert not apart(interval([0.1]), interval([0.5, 0.51])), "an unknown interval is apart from nothing"


def test_crossed_interval_covers_new_seeds_and_new_problems() -> None:
    """Of many drawn grids, the interval holds the truth as often as it says; the seeds' alone far less often."""
    rng, covered, by_seeds = np.random.default_rng(0), 0, 0
    for _ in range(600):
        x = rng.normal(0, 0.3, (5, 1)) + rng.normal(0, 3, 80) + rng.normal(0, 2, (5, 80))
        found, seeds_only = crossed(x), interval(x.mean(axis=1))
        assert found.mean == pytest.approx(seeds_only.mean)
        covered += found.low < 0 < found.high
        by_seeds += seeds_only.low < 0 < seeds_only.high
    assert 0.92 < covered / 600 < 0.985
    assert by_seeds / 600 < 0.9
    assert math.isnan(crossed(np.zeros((1, 9))).low)
    assert crossed(np.full((3, 9), 0.25)).high == 0.25


def record(method: str, seed: int, ece: float, accuracy: float = 0.6, auroc: float = 0.9) -> dict:
    bins = {"count": [1] * 20, "confidence_sum": [0.5] * 20, "correct_sum": [1.0] * 20}
    scores = {"ece": ece, "pce": ece / 2, "brier": 0.1, "auroc": auroc, "mean": 0.7, "bins": bins}
    other = scores | {"ece": 0.9}
    kinds = {"verbal": scores, "token": other, "posthoc": other}
    kinds[METHODS[method].confidence] = scores
    return {
        "family": "qwen3", "method": method, "seed": seed, "recipe": "r", "commit": "abc", "commands": [],
        "seconds": 1.0, "accuracy": accuracy, "n": 10, "mean_length": 20.0, "violation_rate": 0.001,
        "violations": {}, "scores": kinds,
    }  # fmt: skip


def lay_out(tmp_path, cells: list[dict]):
    for cell in cells:
        folder = tmp_path / "grid" / cell["family"] / cell["method"] / f"seed{cell['seed']}"
        folder.mkdir(parents=True)
        (folder / "cell.json").write_text(json.dumps(cell))
        keys = ("confidence", "token_confidence", "posthoc_confidence")
        samples = [{"prompt_id": f"heldout/{i}", "correct": i % 2 == 0} | dict.fromkeys(keys, i / 9) for i in range(9)]
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        if METHODS[cell["method"]].kind == "train":
            row = {"step": 1, "reward/accuracy": 1 / 3, "calibration/auroc": None, "format/violation_rate": 0.02}
            keys = ("confidence/mean", "calibration/pce", "grad_norm/total", "grad_norm/reasoning", "length/mean")
            row |= dict.fromkeys((*keys, "grad_norm/confidence", "grad_cosine/reasoning_confidence"), 0.5)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": s}) + "\n" for s in (1, 2, 3)))
    return tmp_path / "grid"


ECES = {"base": 0.4, "grpo": 0.2, "rlcr": 0.15, "ccgspg": 0.3, "confclass": 0.1, "coupled": 0.18, "dcpo": 0.09}


def test_published_cells_give_summary_tables_and_bars(tmp_path) -> None:
    eces = ECES | {"dcpo_proper": 0.03}
    cells = [record(m, s, ece + 0.001 * s, auroc=0.97 if m == "dcpo_proper" else 0.9 + 0.001 * s)
             for m, ece in eces.items() for s in (1, 2, 3)]  # fmt: skip
    found = {bar["bar"]: bar["holds"] for bar in render(tmp_path / "docs", lay_out(tmp_path, cells))}
    assert all(found.values()), [name for name, holds in found.items() if not holds]
    summary = json.loads((tmp_path / "docs" / "summary.json").read_text())
    assert summary["ccgspg"]["ece"] == pytest.approx([0.301, 0.302, 0.303]), "CCGSPG speaks with its token confidence"
    assert summary["grpo_token"]["ece"] == pytest.approx([0.9] * 3)
    assert {"accuracy", "ece", "pce", "brier", "auroc", "violation_rate"} <= set(summary["dcpo"])
    curve = next(c for c in load_cells(tmp_path / "docs" / ARCHIVE) if c["method"] == "dcpo")["curve"]
    assert curve["reward/accuracy"] == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert np.isnan(curve["calibration/auroc"]).all()
    assert "| DCPO-proper (ours) | 3 | +0.00 | ± 0.00 | ± 0.00 |" in (tmp_path / "docs" / "tables.md").read_text()
    assert "| DCPO-proper (ours) | 3 | 0.600 ± 0.000 | 0.032 ± " in (tmp_path / "docs" / "tables.md").read_text()
    types = [json.loads(line)["type"] for line in (EXAMPLES / "data" / "heldout.jsonl").read_text().splitlines()[:9]]
    published = json.loads(read_archive(tmp_path / "docs" / ARCHIVE)["qwen3.dcpo.1.json"])
    assert published["right"] == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert {name: row["n"] for name, row in published["by_type"].items()} == {
        name: types.count(name) for name in set(types)
    }
    assert all((tmp_path / "docs" / name).stat().st_size > 1000 for name in ("reliability.png", "gradient_norms.png"))


def test_bars_are_missed_when_the_numbers_say_so(tmp_path) -> None:
    cells = [
        record(m, s, ECES.get(m, 0.2) + 0.02 * s, accuracy=0.5 if m == "dcpo" else 0.6) for m in ECES for s in (1, 2)
    ]
    cells += [record("dcpo_proper", s, 0.1 + 0.05 * s) for s in (1, 2)]
    rows = values_by_row(cells, "qwen3")
    failed = [bar["bar"] for bar in bars(rows) if not bar["holds"]]
    assert "DCPO: accuracy at most 1 point below GRPO" in failed
    assert "DCPO-proper against DCPO: ECE better, intervals apart" in failed
    assert "DCPO-proper (ours): AUROC at least 0.95" in failed
    assert bars({name: row for name, row in rows.items() if name != "grpo"}) == [], "nothing is claimed of half a grid"


def test_claims_are_computed_with_their_direction() -> None:
    cells = [
        record(m, s, ece + 0.001 * s, accuracy=0.4 if m == "base" else 0.6) for m, ece in ECES.items() for s in (1, 2)
    ]
    found = {c["claim"]: c for c in claims(values_by_row(cells, "qwen3"))}
    assert found["GRPO is more accurate than base"]["holds"]
    assert found["DCPO has a lower ECE than GRPO"]["holds"]
    assert found["DCPO has a lower ECE than GRPO"]["clear"]
    assert found["DCPO is as accurate as GRPO or more"]["holds"]
    assert not found["DCPO is as accurate as GRPO or more"]["clear"]
    assert "post-hoc training costs accuracy" not in found, "what has not been run is not judged"
    cells = [c | {"accuracy": 0.1} if c["method"] == "dcpo" else c for c in cells]
    assert not next(c for c in claims(values_by_row(cells, "qwen3")) if c["claim"].startswith("DCPO is as"))["holds"]


def test_the_probes_parts_add_up_to_the_objectives() -> None:
    """The coupled parts sum to the coupled advantage, the DCPO parts to DCPO's, token by token."""
    rng = np.random.default_rng(0)
    judgements, decimals = [], []
    for row in range(24):
        ok = rng.random() < 0.8
        status = "ok" if ok else "missing"
        tenths, hundredths = (int(digit) for digit in rng.integers(0, 10, 2))
        decimals.append((DecimalToken(3, tenths, 1, 1), DecimalToken(4, hundredths, 1, 2)) if ok else ())
        confidence = (10 * tenths + hundredths) / 100 if ok else None
        right = float(rng.random() < 0.5)
        judgements.append(Judgement(f"p{row % 4}", right, confidence, status, 3, 5))
    for options in ({}, {"preset": "dcpo_proper"}, {"preset": "verl_compat", "lam": 0.25}):
        config = without_regularizers(ObjectiveConfig(**options, kl_coef=0.1, entropy_coef_confidence=0.1))
        assert not any((*resolve(config).blocks("kl_coef"), *resolve(config).blocks("entropy_coef")))
        parts = parts_of(judgements, config, decimals)
        for name, method in (("coupled", "coupled"), ("dcpo", "dcpo")):
            whole = build_objective(as_method(config, method)).score(judgements, decimals=decimals)
            for a, b, expected in zip(
                parts[f"{name}_accuracy"].tokens, parts[f"{name}_calibration"].tokens, whole.tokens, strict=True
            ):
                assert a.advantages + b.advantages == pytest.approx(expected.advantages, abs=1e-9)
            assert digit_scores(parts[f"{name}_calibration"]) == digit_scores(whole)
        for part in ("counterfactual", "all_digits"):
            assert all(not t.advantages[:3].any() for t in parts[part].tokens), "confidence tokens only"
        assert [len(scores) for scores in digit_scores(parts["all_digits"])] == [len(d) for d in decimals]
        assert not any(digit_scores(parts["counterfactual"]))


def digit_scores(scored: Scored) -> list[list[list[float]]]:
    return [[choices.scores.tolist() for choices in digits] for digits in scored.digits]


def test_tables_leave_out_what_was_not_run() -> None:
    rows = values_by_row([record("dcpo", 1, 0.1)], "qwen3")
    table = markdown_table(rows, ("grpo", "dcpo"))
    assert "GRPO" not in table
    assert "| DCPO | 1 | 0.600 | 0.100 |" in table
    assert row_title("grpo_token") == "GRPO, token"


@pytest.mark.filterwarnings("error")
def test_types_of_problem_are_averaged_over_the_seeds_that_know_the_number() -> None:
    """Where all responses to a type are right there is no AUROC."""
    scores = {"accuracy": 0.5, "mean_confidence": 0.75, "ece": 0.25}
    rows = [{"2x1": {**scores, "auroc": a}, "3x2": {**scores, "auroc": None}} for a in (0.5, None, 0.75)]
    cells = [{"family": "qwen3", "method": "dcpo", "seed": i, "by_type": row} for i, row in enumerate(rows)]
    *_, known, unknown = type_table(cells, ["dcpo"]).splitlines()
    assert known == "| DCPO | 2x1 | 3 | 0.500 | 0.750 | 0.250 | 0.625 |"
    assert unknown == "| DCPO | 3x2 | 3 | 0.500 | 0.750 | 0.250 | – |"


def test_rounding_keeps_six_digits_and_nothing_collected_is_an_error(tmp_path) -> None:
    assert rounded({"a": [1 / 3, None, 7, "x"]}) == {"a": [0.333333, None, 7, "x"]}
    assert collect(tmp_path, tmp_path / "out.tar.xz", EXAMPLES / "data" / "heldout.jsonl") == 0
    with pytest.raises(UserError, match="no finished cell"):
        load_cells(tmp_path / "out.tar.xz")
