"""Samples that others wrote: the logs of Inspect and lm-eval, TRL's completions, verl's rollouts,
or a table with a confidence and a verdict. They become our samples, which every verb reads.

    samples = read_any("logs/2026-01-01_gsm8k.eval")
    samples = read_any("results.csv", {"confidence": "p", "correct": "right"})

Where a log has no confidence of its own, the one that the response states behind the confidence tag
is read, as ``dcpo evaluate`` reads it. Verdicts are those of the log.
"""

from __future__ import annotations

import json
import logging
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.codec import NO_TOKENS
from megatron_dcpo.data.files import read_rows
from megatron_dcpo.errors import UserError, did_you_mean, one_line
from megatron_dcpo.evaluation.samples import Measures, Sample, read_samples
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.types import CONFIDENCE_TAG, Judgement, Prompt, Response

logger = logging.getLogger(__name__)

# what --columns may name: verdict and confidence, and what is shown or counted by
COLUMNS = ("correct", "confidence", "text", "problem", "group", "task", "kind")
_ZSTANDARD = 93  # the number of this compression in a zip file
_RIGHT = {"c": 1.0, "correct": 1.0, "true": 1.0, "yes": 1.0}
_WRONG = {"i": 0.0, "incorrect": 0.0, "false": 0.0, "no": 0.0, "n": 0.0}


@dataclass(frozen=True)
class Answered:
    """One answered problem of a log. ``group`` names the problem, ``correct`` is a verdict in
    [0, 1], and ``confidence`` None if only the text may state one. ``probability`` is what
    the model gives its answer, where the log knows it.
    """

    group: str
    correct: float
    text: str
    confidence: float | None = None
    problem: str = ""
    answer: str = ""
    task: str = ""
    kind: str | None = None
    probability: float | None = None
    finished: bool = True


def read_any(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    marker: str = CONFIDENCE_TAG,
) -> list[Sample]:
    """Return the samples in a file of ``dcpo evaluate``, or in a log of somebody else's.

    ``columns`` names those of a table by our names (:data:`COLUMNS`). Raises :class:`UserError` for
    a file of an unknown form, and for rows without a verdict.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    if columns:
        return _as_samples(_table(file, columns), file, marker)
    if zipfile.is_zipfile(file) and file.suffix == ".eval":
        return _as_samples(_inspect(file), file, marker)
    first = next(iter(read_rows(file)), None)
    if first is None:
        raise UserError(f"{file}: the file has no rows")
    if {"prompt_id", "status"} <= set(first) or "version" in first:
        return read_samples(file)
    for form in _FORMS:
        if form.columns <= set(first):
            return _as_samples(form.read(file), file, marker)
    found = ", ".join(map(str, first))
    known = "; ".join(form.name for form in _FORMS)
    raise UserError(
        f"{file}: neither samples of dcpo evaluate nor a known log (Inspect's .eval; {known}); it "
        f"has the columns {found}: name them, --columns correct=NAME,confidence=NAME"
    )


def parse_columns(text: str) -> dict[str, str]:
    """Return ``{"correct": "right"}`` of ``correct=right``, comma separated. Raises
    :class:`UserError`.
    """
    columns = {}
    for part in filter(None, text.split(",")):
        ours, equal, theirs = part.partition("=")
        if not equal or not theirs:
            raise UserError(f"--columns {part}: expected OURS=THEIRS")
        if ours not in COLUMNS:
            raise UserError(
                f"--columns {part}: {ours} is no column of ours{did_you_mean(ours, COLUMNS)}; "
                f"known: {', '.join(COLUMNS)}"
            )
        columns[ours] = theirs
    return columns


def _as_samples(answered: Iterator[Answered], file: Path, marker: str) -> list[Sample]:
    repeats: dict[tuple[str, str], int] = {}
    samples = []
    for one in answered:
        task = one.task or file.stem
        place = repeats.get((task, one.group), 0)
        repeats[task, one.group] = place + 1
        parsed = parse_confidence(
            one.text, marker=marker, finished=one.finished, opener=""
        )
        confidence, status = parsed.confidence, parsed.status
        if one.confidence is not None:
            confidence, status = one.confidence, "ok"
        judgement = Judgement(
            prompt_id=one.group,
            correct=one.correct,
            confidence=confidence,
            status=status,
            boundary=None,
            length=0,
        )
        samples.append(
            Sample(
                prompt=Prompt(
                    prompt_id=one.group,
                    messages=(),
                    token_ids=(),
                    ground_truth=one.answer,
                    task=task,
                    problem=one.problem,
                    kind=one.kind,
                ),
                response=Response(
                    prompt_id=one.group,
                    sample_index=place,
                    token_ids=NO_TOKENS,
                    logprobs=NO_TOKENS,
                    finish_reason="stop" if one.finished else "length",
                    weights_version=0,
                    text=one.text,
                ),
                judgement=judgement,
                measures=Measures(token_confidence=one.probability),
            )
        )
    if not samples:
        raise UserError(f"{file}: the log has no answered problem with a verdict")
    return samples


# ----------------------------------------------------------------------------------------- tables
def _table(file: Path, columns: Mapping[str, str]) -> Iterator[Answered]:
    if "correct" not in columns:
        raise UserError("--columns must name the verdict: correct=NAME")
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        for theirs in columns.values():
            if theirs not in row:
                found = ", ".join(map(str, row))
                raise UserError(f"{where} has no column {theirs!r}; found {found}")
        values = {ours: row[theirs] for ours, theirs in columns.items()}
        confidence = values.get("confidence")
        yield Answered(
            group=str(values.get("group", number)),
            correct=_verdict(values["correct"], where),
            confidence=None if confidence in (None, "") else _share(confidence, where),
            text=str(values.get("text") or ""),
            problem=str(values.get("problem") or ""),
            task=str(values.get("task") or ""),
            kind=str(values["kind"]) if values.get("kind") is not None else None,
        )


def _verdict(value: object, where: str) -> float:
    """Return a verdict in [0, 1]: a number, a truth value, or Inspect's letters."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _RIGHT or word in _WRONG:
            return {**_RIGHT, **_WRONG}[word]
    return _share(value, where)


def _share(value: object, where: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise UserError(f"{where}: {value!r:.60} is not a number from 0 to 1")
    return number


# ------------------------------------------------------------------------------------ known forms
def _inspect(file: Path) -> Iterator[Answered]:
    """Yield the samples of an Inspect log: the first scorer's verdict, and the confidence that a
    scorer has put into its metadata.
    """
    try:
        header, samples = _parts_of_inspect(file)
    except (OSError, LookupError, ValueError, zlib.error) as error:
        raise UserError(
            f"{file}: not a readable log of Inspect ({one_line(error, 200)}); inspect log convert "
            "writes it anew"
        ) from None
    task = str(header.get("eval", {}).get("task") or file.stem)
    without_score = 0
    for name, sample in samples.items():
        if not sample.get("scores"):
            without_score += 1
            continue
        yield _of_inspect(sample, task, f"{file}: {name}")
    if without_score:
        logger.warning(
            "%s: %d of %d samples have no score (an error, or inspect score was not run) and are "
            "left out",
            file,
            without_score,
            len(samples),
        )


def _parts_of_inspect(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the header of a log and its samples by name. Raises what odd files raise."""
    with zipfile.ZipFile(file) as log:
        entries = {entry.filename: entry for entry in log.infolist()}
        header = json.loads(_entry(file, log, entries["header.json"]))
        samples = {}
        for name in sorted(entries):
            if name.startswith("samples/"):
                samples[name] = json.loads(_entry(file, log, entries[name]))
    return header, samples


def _entry(file: Path, log: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return the content of an entry; Inspect compresses with Zstandard, which Python's zipfile
    does not read before 3.14.
    """
    if entry.compress_type != _ZSTANDARD:
        return log.read(entry)
    with file.open("rb") as raw:
        raw.seek(entry.header_offset)
        fixed = raw.read(30)
        if len(fixed) != 30:
            raise ValueError("it is cut off")
        lengths = (
            int.from_bytes(fixed[26:28], "little"),
            int.from_bytes(fixed[28:30], "little"),
        )
        raw.seek(sum(lengths), 1)
        packed = raw.read(entry.compress_size)
    from zstandard import ZstdDecompressor, ZstdError

    try:
        unpacked: bytes = ZstdDecompressor().decompress(
            packed, max_output_size=entry.file_size
        )
    except ZstdError as error:
        raise ValueError(str(error)) from None
    return unpacked


def _of_inspect(sample: Mapping[str, Any], task: str, where: str) -> Answered:
    score = next(iter(sample["scores"].values()))
    metadata = score.get("metadata") or {}
    confidence = metadata.get("confidence")
    output = sample.get("output") or {}
    choices = output.get("choices") or [{}]
    text = output.get("completion") or _content(choices[0].get("message", {}))
    target = sample.get("target") or ""
    return Answered(
        group=str(sample.get("id")),
        correct=_verdict(score.get("value"), where),
        confidence=None if confidence is None else _share(confidence, where),
        text=text,
        problem=_last_content(sample.get("input")),
        answer=target if isinstance(target, str) else ", ".join(map(str, target)),
        task=task,
        finished=choices[0].get("stop_reason", "stop") in ("stop", "unknown"),
    )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _last_content(value: object) -> str:
    """Return a prompt, or the last message of a list of them."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and isinstance(value[-1], Mapping):
        return _content(value[-1])
    return ""


_METRICS = ("exact_match", "accuracy", "acc", "pass@1", "em", "math_verify")


def _lm_eval(file: Path) -> Iterator[Answered]:
    """Yield the rows of lm-eval's ``samples_TASK_*.jsonl``. A row of a multiple choice has the
    log-probs of its options; the confidence is then the share of the chosen one.
    """
    task = file.stem.removeprefix("samples_").rpartition("_")[0] or file.stem
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        metric = next((name for name in _METRICS if name in row), None)
        if metric is None:
            named = row.get("metrics") or ["none"]
            raise UserError(
                f"{where} has none of the metrics {', '.join(_METRICS)} but {named}; name its "
                "column, --columns correct=NAME"
            )
        responses = row.get("resps") or [[""]]
        probability = _share_of_choice(responses)
        text = ""
        if probability is None:
            text = str(_innermost(responses))
        document = row.get("doc") or {}
        yield Answered(
            group=str(row.get("doc_id")),
            correct=_verdict(row[metric], where),
            confidence=probability,
            text=text,
            problem=_first_text(document, ("question", "problem", "query", "input")),
            answer=str(row.get("target") or ""),
            task=task,
            probability=probability,
        )


def _share_of_choice(responses: Sequence[Any]) -> float | None:
    """Return the softmax of the largest of the options' log-likelihoods; None for generated
    text.
    """
    values = []
    for response in responses:
        inner = response[0] if isinstance(response, Sequence) and response else response
        is_pair = isinstance(inner, Sequence) and not isinstance(inner, str)
        if not is_pair or len(inner) != 2:
            return None
        values.append(float(inner[0]))
    if len(values) < 2:
        return None
    largest = max(values)
    return 1.0 / sum(math.exp(value - largest) for value in values)


def _innermost(value: object) -> object:
    while isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = value[0]
    return value


def _first_text(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((str(row[name]) for name in names if row.get(name)), "")


def _verl(file: Path) -> Iterator[Answered]:
    """Yield the rows of verl's ``rollout_data_dir`` or ``validation_data_dir``: the verdict is
    ``acc`` where the reward function returns one, else the score.
    """
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        yield Answered(
            group=str(row["input"]),
            correct=_verdict(row.get("acc", row["score"]), where),
            text=str(row["output"]),
            problem=str(row["input"]),
            answer=str(row.get("gts") or ""),
        )


_OF_TRL = {"step", "prompt", "completion", "advantage"}


def _trl(file: Path) -> Iterator[Answered]:
    """Yield the rows of TRL's ``completions_*.parquet``: the verdict is the only reward function's
    value. Several have to be told apart.
    """
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        rewards = [
            name
            for name, value in row.items()
            if name not in _OF_TRL and isinstance(value, int | float)
        ]
        if len(rewards) != 1:
            raise UserError(
                f"{where} has the rewards {', '.join(rewards) or 'none'}; name the verdict, "
                "--columns correct=NAME,text=completion,group=prompt"
            )
        prompt = _last_content(row["prompt"])
        yield Answered(
            group=prompt,
            correct=_verdict(row[rewards[0]], where),
            text=_last_content(row["completion"]),
            problem=prompt,
        )


@dataclass(frozen=True)
class _Form:
    """A log that is known by its ``columns``."""

    name: str
    columns: frozenset[str]
    read: Callable[[Path], Iterator[Answered]]


_FORMS = (
    _Form("lm-eval's samples", frozenset({"doc_id", "resps", "target"}), _lm_eval),
    _Form(
        "TRL's completions",
        frozenset({"step", "prompt", "completion", "advantage"}),
        _trl,
    ),
    _Form("verl's rollouts", frozenset({"input", "output", "score"}), _verl),
)
