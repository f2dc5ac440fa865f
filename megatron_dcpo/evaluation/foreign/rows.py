"""Logs in rows: lm-eval's samples, lighteval's details, TRL's completions, verl's rollouts, and the
traces of verifiers, which prime-rl writes too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.data.datasets import kind_of_row, labels_of
from megatron_dcpo.data.files import read_rows
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.foreign.answered import Answered, last_content, share_of_best, verdict

logger = logging.getLogger(__name__)

# of lm-eval and lighteval, the first that a row has
_METRICS = ("exact_match", "extractive_match", "accuracy", "acc", "pass@1", "em", "math_verify")


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


def _lm_eval(file: Path, filter_name: str = "") -> Iterator[Answered]:
    """Yield the rows of lm-eval's ``samples_TASK_*.jsonl``. A row of a multiple choice has the
    log-probs of its options; the confidence is then the share of the chosen one.

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
    return share_of_best(log_likelihoods) if len(log_likelihoods) > 1 else None


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
            correct=verdict(row.get("acc", row["score"]), where),
            text=str(row["output"]),
            problem=str(row["input"]),
            answer=str(row.get("gts") or ""),
            task=str(row.get("data_source") or ""),
        )


_TRL_COLUMNS = {"step", "prompt", "completion", "advantage"}


def _trl(file: Path) -> Iterator[Answered]:
    """Yield the rows of TRL's ``completions_*.parquet``: the verdict is the only reward function's
    value. Several have to be told apart.
    """
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        rewards = [
            name
            for name, value in row.items()
            if name not in _TRL_COLUMNS and isinstance(value, int | float)
        ]
        if len(rewards) != 1:
            raise UserError(
                f"{where} has the rewards {', '.join(rewards) or 'none'}; name the verdict, "
                "--columns correct=NAME,text=completion,group=prompt"
            )
        prompt = last_content(row["prompt"])
        yield Answered(
            group=prompt,
            correct=verdict(row[rewards[0]], where),
            text=last_content(row["completion"]),
            problem=prompt,
        )


_CHOICE_METRIC = "acc"  # lighteval's verdict on the option of the largest log-likelihood


def _lighteval(file: Path) -> Iterator[Answered]:
    """Yield the rows of lighteval's ``details_TASK_*.parquet``. A row of a multiple choice has the
    log-probs of its options instead of a text; the confidence is then the share of the chosen one.
    """
    for number, row in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        document, response = row["doc"], row["model_response"]
        metrics = {name: value for name, value in row["metric"].items() if value is not None}
        metric = next((name for name in _METRICS if name in metrics), None)
        if metric is None and len(metrics) == 1:
            metric = next(iter(metrics))
        if metric is None:
            named = ", ".join(metrics) or "none"
            raise UserError(
                f"{where} has the metrics {named}; name the verdict, "
                "--columns correct=metric.NAME,text=model_response.text.0,group=doc.id"
            )
        texts = response.get("text") or []
        if len(texts) > 1:
            raise UserError(
                f"{where} has {len(texts)} responses and one verdict for all of them; evaluate "
                "with one response for each problem"
            )
        probability = None
        log_likelihoods = response.get("logprobs") or []
        if not texts and metric == _CHOICE_METRIC and len(log_likelihoods) > 1:
            probability = share_of_best(log_likelihoods)
        yield Answered(
            group=str(document.get("id") or number),
            correct=verdict(metrics[metric], where),
            confidence=probability,
            text=texts[0] if texts else "",
            problem=str(document["query"]),
            answer=_gold_of(document),
            task=str(document["task_name"]).partition("|")[0],
            probability=probability,
        )


def _gold_of(document: Mapping[str, Any]) -> str:
    """Return the right one of a document's choices, or the right ones."""
    index = document["gold_index"]
    indices = index if isinstance(index, list) else [index]
    return ", ".join(str(document["choices"][each]).strip() for each in indices)


def _verifiers(file: Path) -> Iterator[Answered]:
    """Yield the traces in ``traces.jsonl`` of verifiers (0.4) and of prime-rl. The verdict is the
    only reward's score, without its weight; traces that failed, or that were not scored, are left
    out and counted, and so are those of agents that are not trained (a judge).
    """
    left_out = total = 0
    for number, episode in enumerate(read_rows(file), start=1):
        where = f"{file}: row {number}"
        traces = [t for t in episode["traces"] if t["agent"].get("trainable", True)]
        total += max(len(traces), 1)
        left_out += not traces
        for trace in traces:
            rewards = {
                name: reward["score"]
                for name, reward in trace["rewards"].items()
                if reward is not None
            }
            if not trace["ok"] or not rewards:
                left_out += 1
                continue
            yield _answered_of_trace(trace, rewards, str(episode["env"].get("id") or ""), where)
    if left_out:
        logger.warning(
            "%s: %d of %d traces failed or have no reward and are left out", file, left_out, total
        )


def _answered_of_trace(
    trace: Mapping[str, Any], rewards: Mapping[str, float], task: str, where: str
) -> Answered:
    if len(rewards) > 1:
        raise UserError(
            f"{where} has the rewards {', '.join(rewards)}; name the verdict, --columns "
            "correct=traces.0.rewards.NAME.score,text=traces.0.nodes.1.message.content,"
            "group=task.key"
        )
    (score,) = rewards.values()
    nodes = trace["nodes"]
    sampled = [number for number, node in enumerate(nodes) if node["sampled"]]
    text, finish_reason = "", None
    if sampled:
        text = last_content([nodes[sampled[-1]]["message"]])
        calls = {call.get("node"): call for call in trace["calls"]}
        finish_reason = calls.get(sampled[-1], {}).get("finish_reason")
    about = trace["task"]
    prompt = last_content(about["data"].get("prompt"))
    return Answered(
        group=str(about.get("key") or about["data"].get("idx")),
        correct=verdict(score, where),
        text=text,
        problem=prompt,
        answer=str(about["data"].get("answer") or ""),
        task=task,
        finished=finish_reason != "length",
    )


@dataclass(frozen=True)
class Form:
    """A log that is known by its ``columns``. With ``has_filters`` its reader also takes the name
    of the filter whose rows are read.
    """

    name: str
    columns: frozenset[str]
    read: Callable[..., Iterator[Answered]]
    has_filters: bool = False


LM_EVAL = Form(
    "lm-eval's samples",
    frozenset({"doc_id", "resps", "target"}),
    _lm_eval,
    has_filters=True,
)
FORMS = (
    LM_EVAL,
    Form("lighteval's details", frozenset({"doc", "metric", "model_response"}), _lighteval),
    Form("verifiers' traces", frozenset({"env", "task", "traces"}), _verifiers),
    Form("TRL's completions", frozenset({"step", "prompt", "completion", "advantage"}), _trl),
    Form("verl's rollouts", frozenset({"input", "output", "score"}), _verl),
)
