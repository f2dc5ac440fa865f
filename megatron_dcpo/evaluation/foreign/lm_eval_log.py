"""lm-eval's ``samples_TASK_*.jsonl``, which ``--log_samples`` writes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcpo.data.labels import kind_of_row, labels_of
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.foreign.answered import Answered, verdict

logger = logging.getLogger(__name__)

# by which a log is known
COLUMNS = frozenset({"doc_id", "resps", "target"})
# the first that a row has
_METRICS = ("exact_match", "accuracy", "acc", "pass@1", "em", "math_verify")


class Filters:
    """The rows of one filter of a log of lm-eval: the ``chosen`` one, or that of the first row."""

    def __init__(self, file: Path, chosen: str = "") -> None:
        self._file = file
        self._chosen = chosen
        self._counts: Counter[str] = Counter()

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is of the filter, and count it."""
        name = str(row.get("filter") or "none")
        self._counts[name] += 1
        self._chosen = self._chosen or name
        return name == self._chosen

    def report(self) -> None:
        """Say which of several filters was read. Raises :class:`UserError` if the file lacks it."""
        chosen, counts = self._chosen, self._counts
        if chosen and chosen not in counts:
            raise UserError(f"{self._file} has no filter {chosen!r}; it has {', '.join(counts)}")
        if len(counts) > 1:
            others = ", ".join(name for name in counts if name != chosen)
            logger.warning(
                "%s: %d rows of the filter %s are read; it also has the filters %s (--columns "
                "filter=NAME)",
                self._file,
                counts[chosen],
                chosen,
                others,
            )


def read_lm_eval(file: Path, filter_name: str = "") -> Iterator[Answered]:
    """Yield the rows of a log. A row of a multiple choice has the log-probs of its options; the
    confidence is then the share of the chosen one.

    A task with several filters logs each document once for each of them: the rows of
    ``filter_name`` are read, of the task's first filter if it is empty.
    """
    task = file.stem.removeprefix("samples_").rpartition("_")[0] or file.stem
    filters = Filters(file, filter_name)
    metrics: Counter[str] = Counter()
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        if not filters.takes(row):
            continue
        metric, *other_metrics = _metrics_of(row, where)
        metrics.update(f"{metric} (and not {other})" for other in other_metrics)
        probability = _share_of_choice(_options_of(row))
        text = ""
        if probability is None:
            text = _only_response(row.get("resps") or [[""]], where)
        document = row.get("doc") or {}
        yield Answered(
            group=str(row.get("doc_id")),
            correct=verdict(row[metric], where),
            confidence=probability,
            text=text,
            problem=_first_text(document, ("question", "problem", "query", "input")),
            answer=str(row.get("target") or ""),
            task=task,
            kind=kind_of_row(document),
            probability=probability,
            labels=labels_of(document),
        )
    filters.report()
    for chosen, count in metrics.items():
        logger.warning(
            "%s: the verdict of %d rows is their %s; --columns correct=NAME names another",
            file,
            count,
            chosen,
        )


def _metrics_of(row: Mapping[str, Any], where: str) -> list[str]:
    """Return the names of the columns that hold a verdict, the one that is read first. Raises
    :class:`UserError` if there is none.
    """
    metrics = [name for name in _METRICS if name in row]
    if not metrics:
        named = row.get("metrics") or ["none"]
        raise UserError(
            f"{where} has none of the metrics {', '.join(_METRICS)} but {named}; name its "
            "column, --columns correct=NAME"
        )
    return metrics


def _options_of(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the responses without the log-likelihoods of the options alone, which
    ``acc_mutual_info`` has lm-eval append (``process_results`` of lm_eval/api/task.py).
    """
    responses: Sequence[Any] = row.get("resps") or []
    if "acc_mutual_info" in (row.get("metrics") or row) and len(responses) % 2 == 0:
        return responses[: len(responses) // 2]
    return responses


def _only_response(responses: Sequence[Any], where: str) -> str:
    """Return the text of a row. Raises :class:`UserError` if one verdict is about several texts."""
    first = responses[0] if responses else ""
    texts = [first] if isinstance(first, str) else list(first)
    count = max(len(responses), len(texts))
    if count > 1:
        raise UserError(
            f"{where} has {count} responses and one verdict for all of them (repeats of the task); "
            "evaluate with repeats: 1, or one task for each repeat"
        )
    return str(texts[0]) if texts else ""


def _share_of_choice(responses: Sequence[Any]) -> float | None:
    """Return the share of the most likely option; None for generated text."""
    log_likelihoods = []
    for response in responses:
        inner = response[0] if isinstance(response, Sequence) and response else response
        is_pair = isinstance(inner, Sequence) and not isinstance(inner, str)
        if not is_pair or len(inner) != 2:
            return None
        log_likelihoods.append(float(inner[0]))
    if len(log_likelihoods) < 2:
        return None
    largest = max(log_likelihoods)
    return 1.0 / sum(math.exp(value - largest) for value in log_likelihoods)


def _first_text(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((str(row[name]) for name in names if row.get(name)), "")
