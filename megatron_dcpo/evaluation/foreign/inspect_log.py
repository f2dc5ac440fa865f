"""Inspect's logs, ``*.eval``: a zip file with a header and an entry for each sample."""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


def read_inspect(file: Path) -> Iterator[Answered]:
    """Yield the samples of an Inspect log: the first scorer's verdict, and the confidence that a
    scorer has put into its metadata.
    """
    try:
        header, samples = _parts_of_inspect(file)
    except (OSError, LookupError, ValueError, zlib.error) as error:
        raise UserError(
            f"{file}: not a readable log of Inspect ({one_line(error, 200)}); inspect log convert "
            "writes it again"
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
        lengths = (int.from_bytes(fixed[26:28], "little"), int.from_bytes(fixed[28:30], "little"))
        raw.seek(sum(lengths), 1)
        packed = raw.read(entry.compress_size)
    from zstandard import ZstdDecompressor, ZstdError

    try:
        unpacked: bytes = ZstdDecompressor().decompress(packed, max_output_size=entry.file_size)
    except ZstdError as error:
        raise ValueError(str(error)) from None
    return unpacked


def _of_inspect(sample: Mapping[str, Any], task: str, where: str) -> Answered:
    score = next(iter(sample["scores"].values()))
    metadata = score.get("metadata") or {}
    confidence = metadata.get("confidence")
    output = sample.get("output") or {}
    choices = output.get("choices") or [{}]
    text = output.get("completion") or content_of(choices[0].get("message", {}))
    target = sample.get("target") or ""
    return Answered(
        group=str(sample.get("id")),
        correct=verdict(score.get("value"), where),
        confidence=None if confidence is None else share(confidence, where),
        text=text,
        problem=last_content(sample.get("input")),
        answer=target if isinstance(target, str) else ", ".join(map(str, target)),
        task=task,
        finished=choices[0].get("stop_reason", "stop") in ("stop", "unknown"),
    )
