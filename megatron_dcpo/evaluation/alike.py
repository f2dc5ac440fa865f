"""Which runs were evaluated alike, so that one table may compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcpo.evaluation import run_description
from megatron_dcpo.evaluation.runs import EvaluatedRun


@dataclass(frozen=True)
class AlikeRuns:
    """Runs that were evaluated on the same ``benchmarks`` and sampled alike, in the words of
    ``sampling``. ``other_problems`` has a line for every benchmark of which they did not all answer
    the same problems.
    """

    runs: Sequence[EvaluatedRun]
    benchmarks: Sequence[str]
    sampling: str
    other_problems: Sequence[str]

    @property
    def title(self) -> str:
        return "; ".join(filter(None, (", ".join(self.benchmarks), self.sampling)))


def evaluated_alike(runs: Sequence[EvaluatedRun]) -> list[AlikeRuns]:
    """Return the runs that have an evaluation in groups, in order of appearance."""
    grouped: dict[tuple[str, ...], list[EvaluatedRun]] = {}
    for run in runs:
        if run.evaluation is not None:
            sampling = run_description.sampling_text(run.settings, run.evaluation)
            key = (*sorted(run.evaluation["benchmarks"]), sampling)
            grouped.setdefault(key, []).append(run)
    groups = []
    for (*_, sampling), members in grouped.items():
        benchmarks = benchmarks_of(members)
        other_problems = []
        for benchmark in benchmarks:
            other_problems += _other_problems(members, benchmark)
        groups.append(AlikeRuns(members, benchmarks, sampling, other_problems))
    return groups


def benchmarks_of(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return the names of all benchmarks of the runs, in order of appearance."""
    names: dict[str, None] = {}
    for run in runs:
        if run.evaluation:
            names.update(dict.fromkeys(run.evaluation["benchmarks"]))
    return list(names)


def _other_problems(runs: Sequence[EvaluatedRun], benchmark: str) -> list[str]:
    """Return a line if the runs did not all answer the same problems of a benchmark, which all of
    them have. Their texts and keys tell, or their number where a run's samples are gone.
    """
    counts = [
        run.evaluation["benchmarks"][benchmark].get("problems") for run in runs if run.evaluation
    ]
    answered = [_problems(run, benchmark) for run in runs]
    known = [problems for problems in answered if problems]
    if len(known) == len(runs):
        if len(set(known)) == 1:
            return []
        shared = len(frozenset.intersection(*known))
        ending = f"; all of them answered {shared:,} of these"
    elif len(set(counts)) == 1:
        return []
    else:
        ending = ""
    said = []
    for run, count in zip(runs, counts, strict=True):
        said.append(f"{run.name} {'an unknown number' if count is None else f'{count:,}'}")
    return [f"{benchmark}: the runs did not answer the same problems ({', '.join(said)}{ending})"]


def _problems(run: EvaluatedRun, benchmark: str) -> frozenset[tuple[str, str]]:
    """Return the text and the key of every problem that a run answered; none if its samples are
    gone or do not have the texts.
    """
    if run.evaluation is None or len(run.samples) != run.evaluation["overall"]["n"]:
        return frozenset()
    found = set()
    for row in run.samples:
        if row.get("task") == benchmark:
            if not row.get("problem"):
                return frozenset()
            found.add((str(row["problem"]), str(row.get("ground_truth"))))
    return frozenset(found)
