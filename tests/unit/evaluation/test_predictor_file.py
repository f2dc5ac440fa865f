"""A file that is not a predictor's is refused in one line, whatever is wrong with it, before it is
unpacked; one of before there were versions is read.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import predictor_file
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc
from tests.helpers.serving import halving, logistic


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Any]:
    """The arrays of a logistic predictor's file."""
    logistic().save(tmp_path / "c.npz")
    with np.load(tmp_path / "c.npz") as file:
        return dict(file)


def header_with(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(parts: dict[str, Any]) -> dict[str, Any]:
        header = json.loads(str(parts["header"]))
        for name, value in changes.items():
            holder = header["fitted_on"] if name in header["fitted_on"] else header
            holder[name] = value
        return {**parts, "header": np.array(json.dumps(header))}

    return changed


def with_array(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda parts: {**parts, name: value}


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "NaN": with_array("slopes", np.full(6, np.nan)),
    "an infinite intercept": with_array("intercept", np.array(np.inf)),
    "another shape": with_array("slopes", np.zeros(3)),
    "a shape of more dimensions": with_array("intercept", np.zeros((1, 1))),
    "missing weights": lambda parts: {n: a for n, a in parts.items() if n != "slopes"},
    "weights too many": with_array("more", np.zeros(1)),
    "weights that are text": with_array("slopes", np.array(["a"] * 6)),
    "complex weights": with_array("slopes", np.zeros(6, complex)),
    "objects": with_array("slopes", np.array([print] * 6, object)),
    "a deviation of 0": with_array("deviation", np.zeros(6)),
    "counts of another shape": with_array("record/counts", np.zeros(3)),
    "counts below 0": with_array("record/counts", np.full(20, -1)),
    "counts with NaN": with_array("record/counts", np.full(20, np.nan)),
    "held-out answers of unequal length": with_array("record/held_out_correct", np.ones(3)),
    "labels that are not 0 or 1": with_array("record/held_out_correct", np.full(100, 7.0)),
    "confidences above 1": with_array("record/held_out_confidences", np.full(100, 7.0)),
    "problems of unequal length": with_array("record/held_out_problems", np.ones(3)),
    "problems that are no numbers of any": with_array(
        "record/held_out_problems", np.full(100, 0.5)
    ),
    "half a record": lambda parts: {n: a for n, a in parts.items() if n != "record/counts"},
    "no header": lambda parts: {n: a for n, a in parts.items() if n != "header"},
    "a header of numbers": with_array("header", np.zeros(2)),
    "a header that is no JSON": with_array("header", np.array("{")),
    "an unknown source": header_with(source="nosuch"),
    "an unknown method": header_with(method="nosuch"),
    "a method that does not read the source": header_with(method="platt"),
    "a source of the wrong type": header_with(source=5),
    "a newer version": header_with(version=2),
    "models of the wrong type": header_with(models=[5]),
    "no models": header_with(models=[]),
    "a marker without characters": header_with(markers=[""]),
    "temperatures of the wrong type": header_with(temperatures=["a"]),
    "an infinite temperature": header_with(temperatures=[float("inf")]),
    "a field that is not known": header_with(nosuch=1),
    "reasons of the wrong type": header_with(finish_reasons=[1]),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_a_wrong_array_or_header_is_refused(
    tmp_path: Path, parts: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    path = tmp_path / "wrong.npz"
    np.savez(path, **change(parts))
    with pytest.raises(UserError) as error:
        Posthoc.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_predictor_are_refused(tmp_path: Path) -> None:
    logistic().save(tmp_path / "c.npz")
    content = (tmp_path / "c.npz").read_bytes()
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    wrong = [b"", content[:900], content[:-30], pickle.dumps(print), array.getvalue()]
    wrong += [bytes(byte ^ (place == at) for place, byte in enumerate(content)) for at in (32, 700)]
    # a header that does not close, and one that is no literal
    for head in (b"{'descr': ('<f8', 'shape': (6,)", b"{'descr': open('x')}", b"\tif:\n 1"):
        broken = io.BytesIO()
        with zipfile.ZipFile(broken, "w") as file:
            padded = head.ljust(117) + b"\n"
            magic = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little")
            file.writestr("header.npy", magic + padded + bytes(48))
        wrong.append(broken.getvalue())
    for number, one in enumerate(wrong):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(one)
        with pytest.raises(UserError):
            Posthoc.load(path)
    (tmp_path / "folder.npz").mkdir()
    for name in ("folder.npz", "none.npz"):
        with pytest.raises(UserError):
            Posthoc.load(tmp_path / name)


@pytest.mark.parametrize("shape", [(1 << 26,), (1 << 60,), (3,), (-1,)])
def test_a_large_array_is_not_unpacked(
    tmp_path: Path, parts: dict[str, Any], shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that is large, nor one that says that it is."""
    monkeypatch.setattr(predictor_file, "_MOST_BYTES", 1 << 20)
    path = tmp_path / "large.npz"
    np.savez(path, **{name: array for name, array in parts.items() if name != "slopes"})
    head = io.BytesIO()
    layout = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, layout)
    size = 2 << 20 if shape == (1 << 26,) else 64
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("slopes.npy", head.getvalue() + bytes(size))
    monkeypatch.setattr(predictor_file.npy, "read_array", None)
    with pytest.raises(UserError):
        Posthoc.load(path)


def test_a_file_of_before_there_were_versions_is_read(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    header = json.loads(str(parts["header"]))
    del header["version"], header["finish_reasons"]
    np.savez(tmp_path / "old.npz", **{**parts, "header": np.array(json.dumps(header))})
    old = Posthoc.load(tmp_path / "old.npz")
    assert old.record is not None
    assert old.record.finish_reasons == ()
    assert old.record.fitted_on == logistic().record.fitted_on  # type: ignore[union-attr]
    halving().save(tmp_path / "new.npz")
    assert Posthoc.load(tmp_path / "new.npz").method == "isotonic"
