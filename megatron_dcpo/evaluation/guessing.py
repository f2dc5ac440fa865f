"""What can be right of a benchmark without reading its questions, and the accuracy by kind.

A policy that learns by reinforcement finds the most frequent answer of a task before it finds the
task. So an accuracy says something only beside that of a policy that always gives this answer, and
a mean over kinds of problems only beside its parts (docs/lab/real_model.md shows what else it may
be).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_dcpo.evaluation.programs import is_code
from megatron_dcpo.evaluation.samples import Sample

NO_KIND = "no kind"  # of problems whose data says none, where others have one
MOST_KINDS = 100  # more are no kinds of problems but nearly names of them


def prompt_blind(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return ``accuracy``, the share of the problems whose key is the most frequent key of their
    benchmark, and that ``answer`` if there is one benchmark; empty if there are no keys to compare.

    Keys are compared as texts, so that two spellings of one number count as two answers and the
    value is too low then. Programs have no key.
    """
    by_benchmark: dict[str, dict[str, str]] = {}
    for sample in samples:
        key = sample.prompt.ground_truth.strip()
        if key and not is_code(sample):
            by_benchmark.setdefault(sample.prompt.task, {})[sample.prompt.prompt_id] = key
    if not by_benchmark:
        return {}
    answers: list[str] = []
    right = 0
    problems = 0
    for keys in by_benchmark.values():
        answer, count = Counter(keys.values()).most_common(1)[0]
        answers.append(answer)
        right += count
        problems += len(keys)
    found: dict[str, Any] = {"accuracy": right / problems}
    if len(answers) == 1:
        found["answer"] = answers[0]
    return found


def by_kind(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Return the scores of each kind of problem of one benchmark: ``n``, ``problems``,
    ``accuracy``, and ``prompt_blind`` of this kind. Empty if the samples are of several benchmarks,
    or have fewer than two kinds, or more than ``MOST_KINDS``.
    """
    if len({sample.prompt.task for sample in samples}) != 1:
        return {}
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.kind or NO_KIND, []).append(sample)
    if not 2 <= len(groups) <= MOST_KINDS:
        return {}
    scores = {}
    for kind, members in sorted(groups.items()):
        scores[kind] = {
            "n": len(members),
            "problems": len({sample.prompt.prompt_id for sample in members}),
            "accuracy": sum(sample.correct for sample in members) / len(members),
            "prompt_blind": prompt_blind(members),
        }
    return scores
