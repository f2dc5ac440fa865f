"""``dcpo judge``: pairs in, verdicts out, in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.cli.judge import read_answer

ROWS = [
    ("so \\boxed{\\frac12}\n<conf> Confidence: 0.9", "0.5", True),
    ("\\frac12", "0.5", True),
    ("\\boxed{3} no: \\boxed{4}", "3", False),
    ("\\boxed{3", "3", False),
    ("<conf> \\boxed{3}", "3", False),
    ("1,000", "1000", True),
    ("(1,000)", "1000", False),
    ("", "", False),
    (5, "5", True),
    (None, "5", False),
    ("a\u2028b\u0085", "5", False),
]


def write(path: Path) -> str:
    rows = [
        json.dumps({"prediction": p, "reference": r, "more": 1}, ensure_ascii=False)
        for p, r, _ in ROWS
    ]
    path.write_text("\n".join(rows) + "\n\n", encoding="utf-8")
    return str(path)


def test_one_line_each_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--pairs", write(tmp_path / "pairs.jsonl"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["correct"] for row in rows] == [correct for _, _, correct in ROWS]


def test_report_names_the_disagreements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--pairs", write(tmp_path / "pairs.jsonl")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("11 pairs, 4 correct, 2 equal as strings\n")
    assert "accepted 2x  '\\\\frac12'  against  '0.5'" in out
    assert "accepted 1x  '1,000'" in out


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prediction": "1"}', '{"prediction": [], "reference": "1"}']
)
def test_bad_lines_are_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prediction": "1", "reference": "1"}\n' + line)
    assert main(["judge", "--pairs", str(path)]) == 2
    assert "pairs.jsonl:2: " in capsys.readouterr().err
    assert main(["judge", "--pairs", str(tmp_path / "none")]) == 2


def test_a_bare_answer_is_no_box() -> None:
    assert read_answer(" 5 ") == "5"
    assert read_answer("\\boxed{5}<conf> 0.5") == "5"
    assert read_answer("5 <conf> 0.5") == "5"
    assert read_answer("\\boxed{5") == ""
