"""Inspect's logs: ``*.eval``, a zip file with a header and an entry a sample, and ``*.json``,
the same in one object.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dcpo.data.labels import kind_of_row, labels_of
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.foreign.answered import (
    Answered,
    content_of,
    last_content,
    share,
    verdict,
)

logger = logging.getLogger(__name__)

_ZSTANDARD = 93  # the number of this compression in a zip file

_NEWEST = 2  # version of the format
_SUCCESS = "success"  # the status of an evaluation that has ended well

# Reasons of an output that is complete: "tool_calls" stays behind an agent that submits its answer
# by a tool, whose text is the completion.
_COMPLETE = ("stop", "unknown", "tool_calls")


def is_inspect_log(file: Path) -> bool:
    """Return whether a file is a log of Inspect, in either of its two formats."""
    if file.suffix == ".eval":
        return zipfile.is_zipfile(file)
    if file.suffix != ".json":
        return False
    try:
        log = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(log, dict) and {"eval", "samples", "status"} <= set(log)


def read_inspect(file: Path, scorer: str = "") -> Iterator[Answered]:
    """Yield the samples of an Inspect log: the verdict of ``scorer`` (NAME, or NAME.KEY for one of
    several values; empty: the first one), and the confidence that a scorer has put into its
    metadata. Samples without a score are left out and counted, and an evaluation that did not end
    well is said.
    """
    try:
        yield from _samples_of_inspect(file, scorer)
    except UserError:
        raise
    except Exception as error:  # whatever a log of another form leads to
        why = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"{file}: not a readable log of Inspect ({why}); inspect log convert writes it again"
        ) from None


def _samples_of_inspect(file: Path, scorer: str) -> Iterator[Answered]:
    header, samples = _parts_of_inspect(file)
    about = header.get("eval") or {}
    task = str(about.get("task") or file.stem)
    _report_unfinished(file, str(header.get("status") or _SUCCESS), len(samples), about)
    valid = {name: one for name, one in samples.items() if not one.get("invalidation")}
    if len(valid) < len(samples):
        logger.warning(
            "%s: %d of %d samples were invalidated and are left out",
            file,
            len(samples) - len(valid),
            len(samples),
        )
    without_score = 0
    others: dict[str, None] = {}
    for name, sample in valid.items():
        where = f"{file}: {name}"
        value, metadata = _score_of(sample, scorer, where)
        others |= dict.fromkeys(sample.get("scores") or {})
        if value is None or value != value:
            without_score += 1
            continue
        yield _answered_of_sample(sample, task, verdict(value, where), metadata, where)
    if not scorer and len(others) > 1:
        logger.warning(
            "%s: the first scorer of each sample is read; the log has the scorers %s (--columns "
            "correct=NAME)",
            file,
            ", ".join(others),
        )
    if without_score:
        logger.warning(
            "%s: %d of %d samples have no score (an error, or inspect score was not run) and are "
            "left out",
            file,
            without_score,
            len(valid),
        )


def _report_unfinished(file: Path, status: str, count: int, about: Mapping[str, Any]) -> None:
    """Say if an evaluation was cancelled, failed or goes on: its log may lack samples."""
    if status == _SUCCESS:
        return
    problems = (about.get("dataset") or {}).get("samples")
    of = "" if problems is None else f", and its data set {problems} problems"
    logger.warning(
        "%s: the status of the evaluation is %s, not success: the log has %d samples%s",
        file,
        status,
        count,
        of,
    )


def _score_of(sample: Mapping[str, Any], scorer: str, where: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the value of a sample's score, None if it has none, and its metadata."""
    scores = sample.get("scores") or {}
    name, _, key = scorer.partition(".")
    if scorer and scores and name not in scores:
        raise UserError(f"{where} has no scorer {name!r}; it has {', '.join(scores)}")
    score = scores.get(name) if scorer else next(iter(scores.values()), None)
    if score is None:
        return None, {}
    value = score.get("value")
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(map(str, range(len(value))))
        name = name or next(iter(scores))
        if key not in keys:
            raise UserError(
                f"{where}: the scorer {name} gives several values; name one, --columns "
                f"correct={name}.KEY, of {', '.join(map(str, keys))}"
            )
        value = value[key] if isinstance(value, dict) else value[int(key)]
    return value, score.get("metadata") or {}


def _parts_of_inspect(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the header of a log and its samples by name. Raises :class:`UserError` for a log
    without a header, and for one of a version that is not read.
    """
    if file.suffix == ".json":
        log = json.loads(file.read_bytes())
        _check_version(file, log)
        numbered = enumerate(log["samples"] or [], start=1)
        return log, {f"sample {number}": sample for number, sample in numbered}
    with zipfile.ZipFile(file) as log:
        entries = {entry.filename: entry for entry in log.infolist()}
        if "header.json" not in entries:
            raise UserError(
                f"{file}: it has no header.json, since its evaluation did not end; inspect log "
                "recover writes one"
            )
        header = json.loads(_entry(file, log, entries["header.json"]))
        _check_version(file, header)
        samples = {}
        for name in sorted(entries):
            if name.startswith("samples/"):
                samples[name] = json.loads(_entry(file, log, entries[name]))
    return header, samples


def _check_version(file: Path, header: Mapping[str, Any]) -> None:
    version = header.get("version", _NEWEST)
    if version not in range(1, _NEWEST + 1):
        raise UserError(
            f"{file}: a log of Inspect's version {version}, of which 1 to {_NEWEST} are read; "
            "inspect log convert writes another one"
        )


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
        lengths = (int.from_bytes(fixed[26:28], "little"), int.from_bytes(fixed[28:30], "little"))
        raw.seek(sum(lengths), 1)
        packed = raw.read(entry.compress_size)
    from zstandard import ZstdDecompressor, ZstdError

    try:
        unpacked: bytes = ZstdDecompressor().decompress(packed, max_output_size=entry.file_size)
    except ZstdError as error:
        raise ValueError(str(error)) from None
    return unpacked


def _answered_of_sample(
    sample: Mapping[str, Any],
    task: str,
    correct: float,
    metadata: Mapping[str, Any],
    where: str,
) -> Answered:
    confidence = metadata.get("confidence")
    output = sample.get("output") or {}
    choices = output.get("choices") or [{}]
    text = output.get("completion") or content_of(choices[0].get("message", {}))
    target = sample.get("target") or ""
    about = sample.get("metadata") or {}
    return Answered(
        group=str(sample.get("id")),
        correct=correct,
        confidence=None if confidence is None else share(confidence, where),
        text=text,
        problem=last_content(sample.get("input")),
        answer=target if isinstance(target, str) else ", ".join(map(str, target)),
        task=task,
        kind=kind_of_row(about),
        labels=labels_of(about),
        finished=choices[0].get("stop_reason", "stop") in _COMPLETE,
    )
