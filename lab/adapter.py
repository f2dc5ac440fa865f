"""A confidence with parameters of its own against a lookup and the bar, on the quickstart's policy
after GRPO: the tables of ``docs/lab/adapter.md``, which commits 4ed10e3d to d9098554 trained, and
of ``docs/lab/adapter_again.md``.
"""

from __future__ import annotations

from lab.confidences import ADAPTERS, SHUFFLED, Study

FIRST = Study(
    name="adapter",
    verb="adapter",
    title="a confidence with parameters of its own",
    compared=("adapter", "adapter, teacher", "boosted trees"),
    against=("bar",),
)
AGAIN = Study(
    name="adapter_again",
    verb="adapter",
    title="a confidence with parameters of its own, fitted on enough answers",
    compared=(
        *(name for name in ADAPTERS if name != SHUFFLED),
        *(f"{name}, greedy" for name in ADAPTERS if name != SHUFFLED),
        "probe",
        "stack",
        "boosted trees",
    ),
    against=("lookup", "bar", "adapter, T = R"),
)
