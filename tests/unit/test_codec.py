"""The codec of judged answers: what is written is read, a field costs little."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo import codec
from megatron_dcpo.calibration import json_ready
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Measures, Origin, Sample, read_samples
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.evaluated import A_SAMPLE
from tests.helpers.paths import REPOSITORY

PROMPT = Prompt(
    prompt_id="toy/3",
    messages=({"role": "user", "content": "2+2?"},),
    token_ids=(1, 2),
    ground_truth="4",
    task="toy",
    tests=b"packed",
    row={"answer": 4, "type": "sum"},
    form="short",
    problem="2+2",
    kind="sum",
)
RESPONSE = Response(
    prompt_id="toy/3",
    sample_index=1,
    token_ids=np.arange(3),
    logprobs=np.zeros(3, np.float32),
    finish_reason="stop",
    weights_version=4,
    text="four\ud800",
    step=2,
    segments=((3, 2), (4, 1)),
)
JUDGEMENT = Judgement(
    prompt_id="toy/3",
    correct=1.0,
    confidence=0.25,
    status="ok",
    boundary=2,
    length=3,
    marker_end=2,
    answer="4",
    category="passed",
    score=0.5,
    logged={"points": 3},
    thinking_tokens=None,
    thinking_characters=1,
)
MEASURES = Measures(0.5, -1.0, 0.25, -2.0, 0.75, [0.5], 0.125)


def through_json(*records: Any) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(json.dumps(json_ready(codec.to_row(*records))))
    return row


def test_records_are_read_as_they_were_written() -> None:
    row = through_json(PROMPT, RESPONSE, JUDGEMENT, MEASURES)
    assert row["version"] == codec.VERSION
    assert all(not isinstance(value, list) for key, value in row.items() if "logprob" in key), row
    assert codec.from_row(Judgement, row) == JUDGEMENT
    assert codec.from_row(Judgement, row).logged == JUDGEMENT.logged
    assert codec.from_row(Measures, row) == MEASURES
    prompt = codec.from_row(Prompt, row)
    assert prompt == codec.as_read(PROMPT)
    assert prompt.row == PROMPT.row
    response = codec.from_row(Response, row)
    assert response.token_ids is codec.NO_TOKENS
    expected = dataclasses.replace(codec.as_read(RESPONSE), text="four\ufffd")
    assert codec.to_row(response) == codec.to_row(expected)


def test_fields_of_two_records_share_a_name_only_if_they_share_the_value() -> None:
    """A row is flat, so a second field of one name would overwrite the first."""
    names = [
        field.name
        for kind in (Prompt, Response, Judgement, Measures)
        for field in dataclasses.fields(kind)
        if field.name not in codec.NOT_IN_FILES.get(kind, {})
    ]
    assert {name for name in names if names.count(name) > 1} == {"prompt_id"}


def test_arrays_are_kept_where_they_are_asked_for() -> None:
    values = codec.to_values(RESPONSE)
    assert values["token_ids"] is RESPONSE.token_ids
    back = codec.from_row(Response, values)
    assert back.logprobs is RESPONSE.logprobs
    assert back.segments == RESPONSE.segments


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 3),
        ("correct", 1.5),
        ("correct", True),
        ("confidence", "0.5"),
        ("status", "okay"),
        ("status", ["ok"]),
        ("length", 1.0),
        ("length", -1),
        ("sample_index", 1 << 41),
        ("segments", [[1, 2, 3]]),
        ("row", [1]),
        ("token_confidence", 1.1),
        ("min_logprob", 1e301),
        ("features", [None]),
        ("finish_reason", "eos"),
    ],
)
def test_odd_values_are_refused_with_file_line_and_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "s.jsonl"
    row = through_json(PROMPT, RESPONSE, JUDGEMENT, MEASURES)
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {field: value}) + "\n")
    with pytest.raises(UserError, match=rf"s\.jsonl:2: .*\b{field}\b"):
        read_samples(path)


@pytest.mark.parametrize("field", ["prompt_id", "task", "sample_index", "correct", "length"])
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    row = through_json(PROMPT, RESPONSE, JUDGEMENT)
    del row[field]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"s\.jsonl:1: .*\b{field}\b"):
        read_samples(path)


@pytest.mark.parametrize("version", [None, 1, 3, True, "2"])
def test_a_row_of_another_version_is_refused(version: object, tmp_path: Path) -> None:
    """The line is named; a row without a version is refused as well."""
    path = tmp_path / "s.jsonl"
    row = through_json(PROMPT, RESPONSE, JUDGEMENT)
    del row["version"]
    if version is not None:
        row["version"] = version
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"s\.jsonl:1: .*\bversion\b"):
        read_samples(path)


def test_every_key_is_documented() -> None:
    page = (REPOSITORY / "docs" / "evaluate.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    keys = {"version", "training_step", "pieces"}
    for kind in (Prompt, Response, Judgement, Measures, Origin):
        absent = codec.NOT_IN_FILES.get(kind, {})
        keys |= {field.name for field in dataclasses.fields(kind)} - set(absent)
    assert keys <= documented


# What a developer does who wants to know whether a response contains the word "perhaps": three
# replacements in two files. Documentation and a test would make four.
NEW_FIELD = {
    "types.py": [
        (
            "    abstained: bool = False",
            '    hedged: bool = False  # the response contains the word "perhaps"\n'
            "    abstained: bool = False",
        )
    ],
    "judging/judge.py": [
        (
            "                prompt_id=response.prompt_id,\n                correct=",
            '                hedged="perhaps" in attempt.reasoning,\n'
            "                prompt_id=response.prompt_id,\n                correct=",
        )
    ],
}
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_dcpo import codec, types
from megatron_dcpo.calibration import json_ready
from megatron_dcpo.evaluation.samples import Measures, Sample, read_samples, write_samples
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.objectives import worksheet
from megatron_dcpo.training.rollouts import restored_groups, saved_groups
from megatron_dcpo.training.recorder import Texts, sample_row
from megatron_dcpo.training.sampler import PromptGroup

text = "perhaps \\\\boxed{4}"
tokens = TokenBytes(tuple(bytes([b]) for b in range(256)))
ids = np.array([*text.encode()], np.int64)
prompt = types.Prompt("p", (), (), "4", "toy")
response = types.Response("p", 0, ids, np.zeros(len(ids), np.float32), "stop", 0)
(judgement,) = judge_many([response], {"p": prompt}, tokens, verifier=verify_answers)
assert judgement.hedged

write_samples([Sample(prompt, replace(response, text=text), judgement)], "samples.jsonl")
assert json.loads(Path("samples.jsonl").read_text())["hedged"] is True
(sample,) = read_samples("samples.jsonl")
assert sample.judgement.hedged

trained = types.TrainingSample(prompt, response, judgement)
texts = Texts(lambda ids: bytes(ids).decode(), eos_ids=(0,))
row = json.loads(json.dumps(json_ready(sample_row(trained, 1, texts, {}))))
assert row["text"] == text, "no end token"
assert row["hedged"] is True
assert codec.from_row(types.Judgement, row).hedged

saved = saved_groups([PromptGroup(prompt, 0, 1, 1, {0: (response, judgement)})])
(group,) = restored_groups(saved, lambda position, count: [prompt], 1)
assert group.responses[0][1].hedged

columns = {"logprobs": [-1.0] * len(ids), "old_logprobs": [-1.0] * len(ids)}
assert worksheet.parse_judgement({**row, **columns}, 0).hedged
print(types.__file__)
"""


def test_a_new_field_of_a_judgement_changes_two_files(tmp_path: Path) -> None:
    """It arrives in samples.jsonl, in the samples of a training, in the groups of a checkpoint and
    in the input of dcpo objective, and comes back from each.
    """
    package = tmp_path / "megatron_dcpo"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "megatron_dcpo", package, ignore=ignored)
    for name, replacements in NEW_FIELD.items():
        text = (package / name).read_text()
        for old, new in replacements:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (package / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert len(NEW_FIELD) + len(("docs/evaluate.md#samples", "a test")) <= 4


def test_a_sample_needs_no_measures() -> None:
    assert codec.from_row(Measures, A_SAMPLE) == Measures()
    assert isinstance(Sample(PROMPT, RESPONSE, JUDGEMENT).measures, Measures)
