"""Training, evaluation and calibration from Python: what ``dcpo train``, ``evaluate`` and
``calibrate`` do, in the process of the caller.

    from megatron_dcpo.api import calibrate, evaluate, train

Options have the names that they have in a configuration (docs/options.md). Several processes are
for ``torchrun -m megatron_dcpo``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError

Options = Mapping[str, Any]


def train(config: str | Path | Options, options: Options | None = None) -> Path:
    """Train a policy by RL, and return the directory of the run.

    ``config`` is a YAML file or its sections as a mapping; ``options`` override it by dotted names,
    as ``{"training.steps": 40}``. An interrupted run continues with ``training.resume`` "auto".
    Raises :class:`UserError` on bad input.
    """
    from megatron_dcpo.config import load_config, overridden, validate
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.loop import train as train_run
    from megatron_dcpo.training.outcome import write_cards

    given = dict(options or {})
    if isinstance(config, Mapping):
        values: Any = dict(config)
        for name, value in given.items():
            values = overridden(values, name, value)
        checked = validate(values, "config")
    else:
        overrides = [f"{name}={_written(value)}" for name, value in given.items()]
        checked = load_config(config, overrides)
    try:
        train_run(checked)
        write_cards(Path(checked.run_dir))
    finally:
        distributed.destroy()
    return Path(checked.run_dir)


def evaluate(
    model: str | Path, benchmarks: str, out: str | Path, options: Options | None = None
) -> dict[str, Any]:
    """Sample a model on ``benchmarks`` (names, or NAME=FILE, separated by commas), judge the
    responses, and return what ``evaluation.json`` in ``out`` holds.

    ``options`` are those of ``dcpo evaluate`` by dotted names, as ``{"evaluation.samples": 8,
    "data.template": "raw"}``. Raises :class:`UserError` on bad input.
    """
    from megatron_dcpo.config.evaluation import load_evaluation
    from megatron_dcpo.evaluation.evaluation_run import run_evaluation

    given = {
        "model.path": str(model),
        "evaluation.benchmarks": benchmarks,
        "run_dir": str(out),
        **(options or {}),
    }
    return run_evaluation(load_evaluation(given))


def calibrate(
    samples: str | Path | Sequence[str | Path],
    out: str | Path,
    features: str = "task",
    held_out: float = 0.2,
    kinds: str = "",
) -> dict[str, dict[str, Any]]:
    """Fit a logistic regression on judged samples (``samples.jsonl`` of an evaluation, or a log of
    another tool), save it at ``out``, and return its scores on the problems that were held out, by
    name: what is stated, the token probabilities, what was fitted (``logistic``), and the lookup.

    ``features`` are those of ``dcpo calibrate``; ``kinds`` names the kinds of problem. Raises
    :class:`UserError` on samples that there is nothing to learn from.
    """
    from megatron_dcpo.evaluation.fitting import PosthocFit, fit_on_files
    from megatron_dcpo.evaluation.posthoc_predictors import FEATURES

    if features.partition(":")[0] not in FEATURES:
        raise UserError(f"features={features!r}: known are {', '.join(FEATURES)}")
    files = [samples] if isinstance(samples, str | Path) else list(samples)
    options = PosthocFit(source=features, held_out=held_out, kinds_by=kinds)
    return fit_on_files([str(file) for file in files], str(out), options).rows


def _written(value: object) -> str:
    """Return a value as an override of the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)
