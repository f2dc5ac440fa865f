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
    options: Mapping[str, Any],
    new_directory: Callable[[str], Path],
) -> Callable[[str, str], Any]:
    """Return a function of a family and a layout, of which any unknown name is one process: the
    ranks' results of the case ``policy``, each computed once.
    """
    made: dict[tuple[str, str], Any] = {}

    def get(family: str, layout: str) -> Any:
        if (family, layout) not in made:
            processes, parallel = layouts.get(layout, (1, {}))
            job = {"model": model(family), "parallel": parallel, "probe": True}
            job |= {"bucket_bytes": 20_000, **options}
            out = new_directory(f"{family}_{layout}")
            (made[family, layout],) = torchrun_all([("policy", job)], processes, out)
        return made[family, layout]

    return get
