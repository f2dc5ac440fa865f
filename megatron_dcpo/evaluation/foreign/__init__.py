"""Samples that others wrote: the logs of Inspect and lm-eval, or a table with a verdict and, if
there is one, a confidence; of the rows of other tools :data:`PRESETS` names the columns. They
become our samples, which every verb reads.

    samples = read_any("logs/2026-01-01_gsm8k.eval")
    samples = read_any("results.csv", {"confidence": "p", "correct": "right"})
    samples = read_any("rollouts/1.jsonl", PRESETS["verl"])

Where a log has no confidence of its own, the one that the response states behind the confidence tag
is read, as ``dcpo evaluate`` reads it. Verdicts are those of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from megatron_dcpo.codec import NO_TOKENS
from megatron_dcpo.data.labels import labels_of
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.errors import UserError, did_you_mean, one_line
from megatron_dcpo.evaluation.foreign.answered import (
    Answered,
    last_content,
    share,
    verdict,
    without_end_token,
)
from megatron_dcpo.evaluation.foreign.inspect_log import is_inspect_log, read_inspect
from megatron_dcpo.evaluation.foreign.lm_eval_log import COLUMNS as OF_LM_EVAL
from megatron_dcpo.evaluation.foreign.lm_eval_log import Filters, read_lm_eval
from megatron_dcpo.evaluation.samples import Measures, Sample, read_samples
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.types import CONFIDENCE_TAG, Judgement, Prompt, Response

logger = logging.getLogger(__name__)

# what --columns may name: verdict and confidence, what is shown or counted by, and the filter of a
# log of lm-eval
COLUMNS = ("correct", "confidence", "text", "problem", "group", "task", "kind", "filter")

# the columns of other tools' rows, which --columns NAME names; where the verdict is missing here,
# its name is that of a reward function: --columns trl,correct=NAME
PRESETS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "lighteval": {
            "correct": "metric.extractive_match",
            "text": "model_response.text",
            "problem": "doc.query",
            "group": "doc.id",
            "task": "doc.task_name",
        },
        "trl": {"text": "completion", "problem": "prompt"},
        "verl": {"correct": "acc|score", "text": "output", "problem": "input"},
        # of prime-rl too: correct=traces.rewards.NAME.score
        "verifiers": {
            "text": "traces.nodes.-1.message.content",
            "problem": "task.data.prompt",
            "group": "task.key",
            "task": "env.id",
        },
    }
)


def read_any(
    path: str | Path, columns: Mapping[str, str] | None = None, marker: str = CONFIDENCE_TAG
) -> list[Sample]:
    """Return the samples in a file of ``dcpo evaluate``, or in a log of somebody else's.

    ``columns`` names those of a table by our names (:data:`COLUMNS`); of a log of Inspect
    ``correct`` names the scorer, of one of lm-eval ``filter`` the filter. Raises
    :class:`UserError` for a file of an unknown form, and for rows without a verdict.
    """
    file = Path(path)
    columns = dict(columns or {})
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    if is_inspect_log(file):
        scorer = columns.pop("correct", "")
        _check_unused(columns, f"{file} is a log of Inspect")
        return _as_samples(read_inspect(file, scorer), file, marker)
    filter_name = columns.pop("filter", "")
    if columns:
        rows = list(_table(file, columns, filter_name))
        if len({(row.task, row.group) for row in rows}) == len(rows):
            rows = _without_labels(rows, file)
        return _as_samples(rows, file, marker)
    first = next(iter(read_rows(file)), None)
    if first is None:
        raise UserError(f"{file}: the file has no rows")
    if _is_ours(first):
        return read_samples(file)
    if set(first) >= OF_LM_EVAL:
        return _as_samples(_rows_of_lm_eval(file, filter_name), file, marker)
    found = ", ".join(map(str, first))
    raise UserError(
        f"{file}: neither samples of dcpo evaluate nor a log of Inspect or lm-eval; it has the "
        f"columns {found}: name them, --columns correct=NAME,confidence=NAME, or whose they are, "
        f"--columns {' or '.join(PRESETS)}"
    )


def has_verdicts_of_ours(path: str | Path, columns: Mapping[str, str] | None = None) -> bool:
    """Return whether a file has samples of ``dcpo evaluate``, whose confidence was read behind the
    tag of that evaluation; :func:`read_any` reads that of a log of somebody else's.
    """
    file = Path(path)
    names_columns = bool(set(columns or ()) - {"filter"})
    if names_columns or not file.is_file() or is_inspect_log(file):
        return False
    return _is_ours(next(iter(read_rows(file)), {}))


def _is_ours(row: Mapping[str, object]) -> bool:
    return {"prompt_id", "status"} <= set(row) or "version" in row


def parse_columns(text: str) -> dict[str, str]:
    """Return ``{"correct": "right"}`` of ``correct=right``, comma separated; a word alone is one of
    :data:`PRESETS`, whose columns the others replace. Raises :class:`UserError`.
    """
    columns: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        ours, equal, theirs = part.partition("=")
        if not equal and part in PRESETS:
            columns = {**PRESETS[part], **columns}
            continue
        if not equal or not theirs:
            raise UserError(
                f"--columns {part}: expected OURS=THEIRS, or one of {', '.join(PRESETS)}"
            )
        if ours not in COLUMNS:
            raise UserError(
                f"--columns {part}: {ours} is no column of ours{did_you_mean(ours, COLUMNS)}; "
                f"known: {', '.join(COLUMNS)}"
            )
        columns[ours] = theirs
    return columns


def _check_unused(columns: Mapping[str, str], what: str) -> None:
    if columns:
        raise UserError(
            f"--columns {','.join(columns)}: {what}, whose columns are known; only correct=SCORER "
            "names something in it"
        )


def _without_labels(rows: Sequence[Answered], file: Path) -> list[Answered]:
    """Return the rows of a table that has one answer to each problem: its columns may say something
    of the answer.
    """
    labels = sorted({name for row in rows for name in row.labels or ()})
    if labels:
        logger.info(
            "%s: one answer to each problem does not show which columns are of the problem; "
            "--columns kind=NAME names its kind: %s",
            file,
            ", ".join(labels),
        )
    return [replace(row, labels=None) for row in rows]


def _as_samples(answered: Iterable[Answered], file: Path, marker: str) -> list[Sample]:
    rows = list(answered)
    labels = _labels_of_problems(rows, file)
    repeats: dict[tuple[str, str], int] = {}
    samples = []
    for one in rows:
        task = one.task or file.stem
        sample_index = repeats.get((task, one.group), 0)
        repeats[task, one.group] = sample_index + 1
        text = without_end_token(one.text)
        parsed = parse_confidence(text, marker=marker, finished=one.finished, opener="")
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
                    labels=labels[task, one.group],
                ),
                response=Response(
                    prompt_id=one.group,
                    sample_index=sample_index,
                    token_ids=NO_TOKENS,
                    logprobs=NO_TOKENS,
                    finish_reason="stop" if one.finished else "length",
                    weights_version=0,
                    text=text,
                ),
                judgement=judgement,
                measures=Measures(token_confidence=one.probability),
            )
        )
    if not samples:
        raise UserError(f"{file}: the log has no answered problem with a verdict")
    partly = sum(0 < sample.judgement.correct < 1 for sample in samples)
    if partly:
        logger.warning(
            "%s: %d of %d verdicts are between 0 and 1 and count as wrong: accuracy and "
            "calibration count answers that are wholly right",
            file,
            partly,
            len(samples),
        )
    return samples


def _labels_of_problems(
    answered: Sequence[Answered], file: Path
) -> dict[tuple[str, str], dict[str, str]]:
    """Return the labels of each task and problem: what differs between the answers to a problem is
    no label of it.
    """
    labels: dict[tuple[str, str], dict[str, str]] = {}
    differing: set[str] = set()
    for one in answered:
        key = (one.task or file.stem, one.group)
        of_answer = dict(one.labels or {})
        of_problem = labels.setdefault(key, of_answer)
        differing |= {name for name, _ in of_problem.items() ^ of_answer.items()}
    return {
        key: {name: value for name, value in of_problem.items() if name not in differing}
        for key, of_problem in labels.items()
    }


def _rows_of_lm_eval(file: Path, filter_name: str) -> Iterator[Answered]:
    try:
        yield from read_lm_eval(file, filter_name)
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: not as lm-eval's samples are written by the release that is known here "
            f"({type(error).__name__}: {one_line(error, 100)}); name the columns, "
            "--columns correct=NAME,confidence=NAME"
        ) from None


# ----------------------------------------------------------------------------------------- tables
def _table(file: Path, columns: Mapping[str, str], filter_name: str) -> Iterator[Answered]:
    """Yield the rows of a table; with a ``filter_name``, those whose column ``filter`` has it. Of a
    log of lm-eval only the rows of one filter are read. Rows of one group, without such a column of
    one problem, are answers to the same problem. A row whose group is blank is a problem of its
    own, and one that has no verdict inside its column is left out; how many there are is said.
    """
    if "correct" not in columns:
        raise UserError("--columns must name the verdict: correct=NAME")
    filters = Filters(file, filter_name)
    # columns that say something of an answer are no kinds of problem
    read = {
        theirs for ours, names in columns.items() if ours != "kind" for theirs in names.split("|")
    }
    grouped_by = "group" if "group" in columns else "problem"
    kinds: dict[tuple[str, str], str | None] = {}
    without_group = without_verdict = 0
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        if filter_name:
            _at(row, "filter", where)  # refuses a table without it
        if (filter_name or set(row) >= OF_LM_EVAL) and not filters.takes(row):
            continue
        values = {ours: _at(row, theirs, where) for ours, theirs in columns.items()}
        if values["correct"] is None and columns["correct"] not in row:
            without_verdict += 1
            continue
        confidence = values.get("confidence")
        group = values.get(grouped_by, number)
        if _is_blank(group):
            group = f"row {number}"  # unlike any number that names another problem
            without_group += 1
        named = values.get("kind")
        kind = None if _is_blank(named) else str(named)
        task = str(values.get("task") or "")
        problem = (task, _text(group, where))
        if kinds.setdefault(problem, kind) != kind:
            raise UserError(
                f"{where}: the kind {kind!r:.40} is of the answer: another one to the same problem "
                f"has {kinds[problem]!r:.40}; --columns kind= names a column of the problem"
            )
        yield Answered(
            group=problem[1],
            correct=verdict(values["correct"], where),
            confidence=None if confidence in (None, "") else share(confidence, where),
            text=_text(values.get("text"), where),
            problem=_text(values.get("problem"), where),
            task=task,
            kind=kind,
            labels=labels_of({name: row[name] for name in row if name not in read}),
        )
    if without_group:
        logger.warning(
            "%s: %d rows have no %s, and each counts as a problem of its own",
            file,
            without_group,
            columns[grouped_by],
        )
    if without_verdict:
        logger.warning(
            "%s: %d rows have no %s and are left out", file, without_verdict, columns["correct"]
        )
    filters.report()


def _text(value: object, where: str) -> str:
    """Return a text, the last of several messages, or the only one of a list of texts. Raises
    :class:`UserError` for several texts, about which there is one verdict.
    """
    if not isinstance(value, list):
        return "" if value is None else str(value)
    if not value or isinstance(value[0], Mapping):
        return last_content(value)
    if len(value) > 1:
        raise UserError(
            f"{where} has {len(value)} responses and one verdict for all of them; evaluate with "
            "one response for each problem"
        )
    return str(value[0])


def _is_blank(value: object) -> bool:
    """Return whether a cell says nothing: null, no number, or white space."""
    return value is None or value != value or not str(value).strip()


def _at(row: Mapping[str, object], name: str, where: str) -> object:
    """Return a column of a row, or what is inside one: ``metric.f1``, ``texts.0``; of a list of one
    its number may be left out. Of ``acc|score`` the first that there is. None if the column has no
    such thing inside.
    """
    names = [name] if name in row else name.split("|")
    for one in names:
        if one in row:
            return row[one]
    first, *parts = names[-1].split(".")
    if first not in row or not parts:
        found = ", ".join(map(str, row))
        raise UserError(f"{where} has no column {name!r}; found {found}")
    value: object = row[first]
    for part in parts:
        is_number = part.removeprefix("-").isdecimal()
        if isinstance(value, list) and not is_number:
            if len(value) > 1:
                raise UserError(
                    f"{where}: {name} has to say which of {len(value)}, as in {first}.0"
                )
            value = value[0] if value else None
        try:
            if isinstance(value, list):
                value = value[int(part)]
            else:
                value = value[part] if isinstance(value, Mapping) else None
        except LookupError:
            return None
    return value
