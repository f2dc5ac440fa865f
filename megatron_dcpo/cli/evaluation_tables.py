"""The tables of ``dcpo evaluate`` on a terminal: scores, pass@k, accuracy by kind of problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dcpo.runtime.text import printable

_MOST_KINDS_SHOWN = 20
_LONGEST_ANSWER = 30


def print_evaluation(evaluation: Mapping[str, Any]) -> None:
    """Print the table of results for people."""
    from megatron_dcpo.cli.tables import print_table
    from megatron_dcpo.data.problem_kinds import no_kinds_line
    from megatron_dcpo.evaluation.scoring import BASELINES, headline, scored_kinds

    scored = dict(evaluation["benchmarks"])
    if len(scored) > 1:
        scored["overall"] = evaluation["overall"]
    rows = {}
    for name, scores in scored.items():
        benchmark = name if name in evaluation["benchmarks"] else None
        baselines = [kind for kind in BASELINES if kind in scores]
        for kind in (*scored_kinds(scores), *baselines):
            rows[f"{name} {kind}"] = headline(evaluation, kind, benchmark)
    print_table(rows, "benchmark")
    if not evaluation["kinds"]["by"]:
        print(printable(no_kinds_line(evaluation["kinds"]["possible"])))
    for name, scores in scored.items():
        _print_mixed(name, scores)
    _print_passes(scored)
    _print_guesses(scored)
    for name, scores in evaluation["benchmarks"].items():
        _print_refusals(name, scores)
        _print_reading(name, scores)
        rates = scores.get("abstention")
        if rates:
            shown = []
            for key, value in rates.items():
                if value is not None:
                    shown.append(f"{key} {value:.3f}")
            print(printable(f"{name} abstention: {', '.join(shown)}"))


def _print_mixed(name: str, scores: Mapping[str, Any]) -> None:
    """Say which problems a confidence is measured within, if problems have several answers."""
    if scores["repeats"] < 2:
        return
    mixed, problems = scores["lookup"]["problems_used"], scores["problems"]
    said = f"{mixed:,} of the {problems:,} problems have right and wrong answers"
    print(printable(f"{name}: {said}"))


def _print_passes(scored: Mapping[str, Mapping[str, Any]]) -> None:
    """Print pass@k of each benchmark, in percent, with its 95 % interval."""
    from rich.table import Table
    from rich.text import Text

    from megatron_dcpo.cli.tables import print_whole

    sizes: dict[str, None] = {}
    for scores in scored.values():
        sizes.update(dict.fromkeys(scores.get("pass_at_k", {})))
    if not sizes:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    columns = sorted(sizes, key=int)
    for k in columns:
        table.add_column(f"pass@{k}", justify="right", no_wrap=True)
    for name, scores in scored.items():
        ends_of = (scores.get("ci95") or {}).get("pass_at_k", {})
        cells = []
        for k in columns:
            value = scores.get("pass_at_k", {}).get(k)
            cells.append(_percent(value, ends_of.get(k)))
        table.add_row(Text(printable(name)), *cells)
    print_whole(table)


def _print_guesses(scored: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the accuracy of each benchmark and of each of its kinds, next to the accuracy of always
    giving its most frequent answer.
    """
    from rich.table import Table
    from rich.text import Text

    from megatron_dcpo.cli.tables import print_whole

    table = Table(box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for column in ("problems", "accuracy", "prompt-blind"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("by always answering", no_wrap=True)
    for name, scores in scored.items():
        parts = {name: scores}
        kinds = scores.get("by_kind", {})
        for kind, of_kind in list(kinds.items())[:_MOST_KINDS_SHOWN]:
            parts[f"  {kind}"] = of_kind
        for title, part in parts.items():
            blind = part.get("prompt_blind", {})
            table.add_row(
                Text(printable(title)),
                str(part.get("problems", "–")),
                _percent(part.get("accuracy"), None),
                _percent(blind.get("accuracy"), None),
                Text(printable(str(blind.get("answer", "")))[:_LONGEST_ANSWER]),
            )
        if len(kinds) > _MOST_KINDS_SHOWN:
            table.add_row(f"  {len(kinds) - _MOST_KINDS_SHOWN} more kinds")
    print_whole(table)


def _percent(value: float | None, ends: Sequence[float] | None) -> str:
    """Return ``50.0% (41.2 to 58.8)``, or a dash for a missing value."""
    if value is None:
        return "–"
    text = f"{100 * value:.1f}%"
    if ends:
        low, high = ends
        text += f" ({100 * low:.1f} to {100 * high:.1f})"
    return text


def _print_reading(name: str, scores: Mapping[str, Any]) -> None:
    """Say what a post-hoc confidence was read from."""
    by = scores.get("posthoc", {}).get("by")
    if by:
        print(printable(f"{name} posthoc: {'; '.join(by)}"))


def _print_refusals(name: str, scores: Mapping[str, Any]) -> None:
    if "refused_rate" not in scores:
        return
    share = f"{100 * scores['refused_rate']:.1f}%"
    said = f"{name}: the server refused {share} of the samples (refused_rate)"
    print(printable(f"{said}; they count as wrong"))
