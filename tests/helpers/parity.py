"""Families of models against transformers, and in every layout against one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import torchrun_all

Layouts = Mapping[str, tuple[int, dict[str, Any]]]


def cases(
    families: Collection[str], layouts: Collection[str], quick: Collection[tuple[str, str]]
) -> list[Any]:
    """Return every family in every layout, as parameters; those that are not ``quick`` are in the
    full suite.
    """
    found = []
    for family in families:
        for layout in layouts:
            marks = [] if (family, layout) in quick else [pytest.mark.full]
            found.append(pytest.param(family, layout, marks=marks))
    return found


def differences(models: Mapping[str, str], out: Path) -> dict[str, Any]:
    """Return how far each model's log-probs and gradients are from those of transformers."""
    jobs = [("gradients", {"model": model}) for model in models.values()]
    results = torchrun_all(jobs, 1, out)
    return dict(zip(models, [ranks[0] for ranks in results], strict=True))


def results_in(
    model: Callable[[str], str],
    layouts: Layouts,
    quick: Collection[tuple[str, str]],
    options: Mapping[str, Any],
    new_directory: Callable[[str], Path],
) -> Callable[[str, str], Any]:
    """Return a function of a family and a layout, of which any unknown name is one process: the
    ranks' results of the case ``policy``, each computed once, the ``quick`` ones together.
    """
    made: dict[tuple[str, str], Any] = {}
    together = {*quick, *((family, "one process") for family, _ in quick)}

    def processes(layout: str) -> int:
        return layouts[layout][0] if layout in layouts else 1

    def job(family: str, layout: str) -> dict[str, Any]:
        _, parallel = layouts.get(layout, (1, {}))
        own = {"model": model(family), "parallel": parallel}
        return own | {"bucket_bytes": 20_000, **options}

    def get(family: str, layout: str) -> Any:
        key = (family, layout)
        if key not in made:
            count = processes(layout)
            keys = sorted(other for other in together if processes(other[1]) == count)
            keys = keys if key in together else [key]
            jobs = [("policy", job(*other)) for other in keys]
            results = torchrun_all(jobs, count, new_directory(f"{family}_{layout}"))
            made.update(zip(keys, results, strict=True))
        return made[key]

    return get
