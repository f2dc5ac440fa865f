"""The file of a predictor says what it was fitted on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.data.prompts import confidence_instruction
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.fit_record import fitted_on_of, instruction
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc
from megatron_dcpo.evaluation.samples import read_samples, write_samples
from tests.unit.evaluation.test_posthoc import SAMPLES

SETTINGS = {
    "model": "policy",
    "template": "paper",
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 20,
    "max_tokens": 64,
}


def directory(path: Path, **settings: object) -> str:
    path.mkdir()
    write_samples(SAMPLES, path / "samples.jsonl")
    (path / "settings.json").write_text(json.dumps(settings))
    return str(path / "samples.jsonl")


def calibrate(out: Path, *files: str, held_out: float = 0.3) -> Posthoc:
    kind = ["--kind", "isotonic", "--source", "verbal", "--held-out", str(held_out)]
    command = ["calibrate", "--samples", *files, *kind, "--out", str(out)]
    assert main(command) == 0
    return Posthoc.load(out)


def test_what_the_settings_say_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = directory(tmp_path / "a", **SETTINGS)
    again = directory(tmp_path / "b", **SETTINGS, marker="<sure>")
    second = directory(tmp_path / "c", **{**SETTINGS, "model": "other", "top_k": 0})
    predictor = calibrate(tmp_path / "c.npz", first, second)
    assert predictor.record is not None
    fitted_on = predictor.record.fitted_on
    assert fitted_on is not None
    (said,) = [one.getMessage() for one in caplog.records if "mixture" in one.getMessage()]
    assert "model policy and other; top_k 20 and 0" in said
    assert fitted_on.mixed() == ["model policy and other", "top_k 20 and 0"]
    assert fitted_on.models == ("policy", "other")
    assert fitted_on.templates == ("paper",)
    assert fitted_on.temperatures == (0.7,)
    assert fitted_on.top_ps == (0.95,)
    assert fitted_on.top_ks == (20, 0)
    assert fitted_on.markers == ("<conf>",)
    assert fitted_on.forms == ("math",)
    assert fitted_on.thinking == ("off",)
    assert fitted_on.weights == ()
    (parts,) = fitted_on.instructions
    asked = confidence_instruction("2*3=")
    assert all(part in asked for part in parts)
    assert parts != ()
    both = fitted_on_of([first, again], read_samples(first))
    assert both is not None
    assert both.markers == ("<conf>", "<sure>")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"max_tokens": 32}, ""),
        ({"model": "other"}, "model other, fitted was policy"),
        ({"weights": {"model.safetensors": [8, 2]}}, "files have changed"),
        ({"template": "raw"}, "template raw, fitted was paper"),
        ({"temperature": 1.0}, "temperature 1, fitted was 0.7"),
        ({"top_p": 1.0, "top_k": 0}, "top_p 1, fitted was 0.95; top_k 0, fitted was 20"),
        ({"marker": "<sure>"}, "marker <sure>, fitted was <conf>"),
        ({"thinking": "on"}, "thinking on, fitted was off"),
    ],
)
def test_other_answers_than_the_fitted_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, object], said: str
) -> None:
    settings = SETTINGS | {"weights": {"model.safetensors": [8, 1]}}
    calibrate(tmp_path / "c.npz", directory(tmp_path / "a", **settings))
    others = directory(tmp_path / "b", **settings | changed)
    command = ["evaluate", "--samples", others, "--calibrator", str(tmp_path / "c.npz")]
    assert main([*command, "--resamples", "0", "--out", str(tmp_path / "out")]) == 0
    assert said in caplog.text
    assert ("fitted on other answers" in caplog.text) == bool(said)


def test_a_model_has_the_names_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "policy")
    file = directory(tmp_path / "a", **SETTINGS | {"model": str(tmp_path / "policy")})
    fitted_on = fitted_on_of([file], read_samples(file))
    assert fitted_on is not None
    assert fitted_on.fits_model(str(tmp_path / "link"))
    assert not fitted_on.fits_model(str(tmp_path / "a"))
    assert not fitted_on.fits_model("")


def test_held_out_predictions_and_labels_are_kept(tmp_path: Path) -> None:
    file = directory(tmp_path / "a", **SETTINGS)
    record = calibrate(tmp_path / "c.npz", file).record
    assert record is not None
    predictor = Posthoc.load(tmp_path / "c.npz")
    samples = read_samples(file)
    predictions = predictor.predict(samples)
    kept = sorted(zip(record.held_out_confidences, record.held_out_correct, strict=True))
    assert 0 < len(kept) < len(samples)
    everything = sorted(
        (float(p), float(s.correct))
        for p, s in zip(predictions, samples, strict=True)
        if p is not None
    )
    for pair in kept:
        everything.remove(pair)
    assert record.counts.sum() == len(kept)
    assert record.held_out_problems is not None
    _, repeats = np.unique(record.held_out_problems, return_counts=True)
    assert set(repeats.tolist()) == {5}
    on_all = calibrate(tmp_path / "all.npz", file, held_out=0).record
    assert on_all is not None
    assert len(on_all.held_out_correct) == 0
    assert on_all.counts.sum() == len(samples)


@pytest.mark.parametrize("settings", [None, {}, {**SETTINGS, "temperature": "hot"}])
def test_without_settings_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, object] | None
) -> None:
    file = directory(tmp_path / "a", **(settings or {}))
    if settings is None:
        (tmp_path / "a" / "settings.json").unlink()
    record = calibrate(tmp_path / "c.npz", file).record
    assert record is not None
    assert record.fitted_on is None
    assert "settings.json" in caplog.text


def test_a_template_that_is_gone_has_no_instruction() -> None:
    assert instruction("raw", "<conf>", "math") == ()
    assert instruction("gone.py:render", "<conf>", "math") == ()
    assert "```python" in instruction("paper", "<conf>", "code")[0]


@pytest.mark.parametrize("fitted_on", [3, [], {"models": 1}, {"models": ["a"]}, "x"])
def test_a_damaged_record_is_no_predictor(tmp_path: Path, fitted_on: object) -> None:
    file = directory(tmp_path / "a", **SETTINGS)
    predictor = calibrate(tmp_path / "c.npz", file)
    with np.load(tmp_path / "c.npz") as old:
        arrays = dict(old)
    header = json.loads(str(arrays["header"]))
    arrays["header"] = np.array(json.dumps({**header, "fitted_on": fitted_on}))
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(UserError, match=r"d\.npz: not a predictor"):
        Posthoc.load(tmp_path / "d.npz")
    del arrays["record/counts"]
    np.savez(tmp_path / "e.npz", **arrays)
    with pytest.raises(UserError, match=r"e\.npz: not a predictor"):
        Posthoc.load(tmp_path / "e.npz")
    replace(predictor, record=None).save(tmp_path / "f.npz")
    assert Posthoc.load(tmp_path / "f.npz").record is None


def test_a_table_is_fitted_on_by_the_names_of_its_columns(tmp_path: Path) -> None:
    rows = [f"{number},{number % 3 > 0:d},{0.2 + number % 5 / 8}" for number in range(60)]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(["id,is_right,p_true", *rows]) + "\n")
    out = tmp_path / "fitted.npz"
    command = ["calibrate", "--samples", str(table), "--out", str(out)]
    command += ["--kind", "platt", "--source", "verbal"]
    assert main(command) == 2
    assert main([*command, "--columns", "correct=is_right,confidence=p_true"]) == 0
    assert out.is_file()
