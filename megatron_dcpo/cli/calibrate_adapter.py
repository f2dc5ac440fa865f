"""``dcpo calibrate --kind adapter``: a low-rank adapter that states a confidence, fitted on judged
samples, or read out on others (``--apply``).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import refuse_given
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from megatron_dcpo.config.supervised import SupervisedConfig
    from megatron_dcpo.evaluation.samples import Sample
    from megatron_dcpo.training.confidence_adapter import Asking, Reading

logger = logging.getLogger(__name__)

# what the training of an adapter begins with; section.key=value overrides it
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "data": {"examples_per_step": 32},
    "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
    "training": {"epochs": 2, "save_interval": 0},
}

# the options of dcpo sft that a flag sets here
_FLAGS: Mapping[str, str] = {
    "run_dir": "--out",
    "seed": "--seed",
    "model.path": "--model",
    "data.path": "--samples",
    "objective.name": "--target",
    "evaluation.path": "--held-out",
}
# those that a fit does not read, and the only ones that --apply reads
_NOT_OF_A_FIT = ("data.columns", "data.limit")
_OF_APPLY = (
    "model.",
    "parallel.",
    "data.examples_per_step",
    "data.max_length",
    "training.micro_batch_size",
    "training.max_tokens_per_micro_batch",
)

# the settings of an evaluation that decide a prompt, and those that it leaves out
_ASKED = ("template", "thinking", "marker")
_USUAL = {"thinking": "off", "marker": CONFIDENCE_TAG}

# what is read of the distribution over the numbers
_READ_AS = {"mean": "the mean of the numbers", "greedy": "the most probable number"}


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.evaluation.posthoc import reads_states
    from megatron_dcpo.evaluation.samples import read_samples
    from megatron_dcpo.evaluation.states import with_states
    from megatron_dcpo.runtime import distributed, signals

    _check_options(args)
    settings = _settings_of(args.samples)
    samples = []
    for path in args.samples:
        read = read_samples(path)
        samples += with_states(read, path) if reads_states(args.teacher or "") else read
    signals.install_handlers()
    try:
        if args.apply:
            return _apply(args, samples, settings)
        return _fit(args, samples, settings)
    finally:
        distributed.destroy()


def _check_options(args: argparse.Namespace) -> None:
    names = ("source", "features", "task_column")
    refuse_given(args, names, "does not go with --kind adapter; remove it")
    refuse_given(args, ["epochs"], "goes with --kind confclass; of an adapter: training.epochs=N")
    if args.apply:
        _check_written(args)
        return
    refuse_given(args, ["read"], "goes with --apply; a fit shows the scores of every reading")
    refuse_given(args, ["demonstrations"], "goes with --apply")
    if not args.model:
        raise UserError("--kind adapter needs --model DIR: the model that the adapter is added to")


def _check_written(args: argparse.Namespace) -> None:
    """Raise :class:`UserError` if what is written has no directory, or if the demonstrations would
    replace samples.
    """
    for option, path in (("--out", args.out), ("--demonstrations", args.demonstrations)):
        if path and not Path(path).parent.is_dir():
            raise UserError(f"{option} {path}: there is no directory {Path(path).parent}; make it")
    if not args.demonstrations:
        return
    if Path(args.demonstrations).suffix != ".jsonl":
        raise UserError(
            f"--demonstrations {args.demonstrations}: dcpo sft reads them by the ending of their "
            "name; give it .jsonl"
        )
    others = {Path(path).resolve() for path in (args.out, *args.samples)}
    if Path(args.demonstrations).resolve() in others:
        raise UserError(
            f"--demonstrations {args.demonstrations} is the file of the samples; name another one"
        )


def _fit(args: argparse.Namespace, samples: Sequence[Sample], settings: Mapping[str, Any]) -> int:
    from megatron_dcpo.cli.report import show_scores
    from megatron_dcpo.evaluation.scoring import checked_kinds, confidences_of, scores_of_arms
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.confidence_adapter import READINGS, FitOptions, fit

    kinds = checked_kinds(samples, args.kinds or "")
    adapter: dict[str, Any] = {"rank": 16}
    config = _configured(args, settings, run_dir=args.out, adapter=adapter)
    read = fit(
        config,
        samples,
        _asking(settings, decimals=args.decimals or 2),
        FitOptions(
            teacher=args.teacher or "correct",
            held_out=args.held_out,
            seed=args.seed,
            target=args.target or "brier",
            kinds=args.kinds or "",
        ),
    )
    if distributed.topology().rank:
        return 0
    rows = {}
    if read:
        stated = [sample for sample, _ in read]
        arms = {kind: confidences_of(stated, kind) for kind in ("verbal", "token")}
        for by in READINGS:
            arms[f"adapter, {by}"] = confidences_of(with_readings(read, by), "posthoc")
        rows = scores_of_arms(stated, arms, args.kinds or "")
    show_scores("adapter", args.out, rows, kinds, as_json=args.json)
    return 0


def _apply(args: argparse.Namespace, samples: Sequence[Sample], settings: Mapping[str, Any]) -> int:
    from megatron_dcpo.evaluation.restated import check_asked
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.confidence_adapter import (
        FittedAnswers,
        adapter_of,
        described,
        read_out,
        warn_of_fit,
    )

    directory = Path(args.apply)
    fitted = described(directory)
    args.model = args.model or str(fitted["model"])
    _warn_of_another_model(directory, fitted, args.model)
    _check_asked_alike(directory, fitted, settings)
    if args.demonstrations:
        check_asked(samples, str(fitted["template"]), str(fitted["marker"]))
    warn_of_fit(FittedAnswers.described(fitted), samples)
    adapter = {"path": adapter_of(directory)}
    config = _configured(args, {**settings, **fitted}, run_dir=str(directory), adapter=adapter)
    asking = _asking({**settings, **fitted}, decimals=int(str(fitted["decimals"])))
    readings = read_out(config, samples, asking)
    if distributed.topology().rank == 0:
        read = list(zip(samples, readings, strict=True))
        _write_read(args, read, asking.marker)
    return 0


def _warn_of_another_model(directory: Path, fitted: Mapping[str, object], model: str) -> None:
    """Say it if an adapter is read on another model than the one it was fitted on, or on other
    weights under the same name.
    """
    from megatron_dcpo.evaluation.model_files import digest_of_files, files_of
    from megatron_dcpo.runtime import hub

    fitted_on = str(fitted["model"])
    # a model of the hub is described with its commit
    names = (fitted_on, fitted_on.partition("@")[0])
    if Path(model).resolve() not in [Path(name).resolve() for name in names]:
        logger.warning(
            "%s was fitted on %s and is read on %s: unless that is the same model, its numbers "
            "mean nothing",
            directory,
            fitted_on,
            model,
        )
        return
    files = digest_of_files(files_of(hub.model_directory(model)))
    # an earlier release did not describe them
    if fitted.get("files", files) != files:
        logger.warning(
            "%s was fitted on other files of %s than there are now: unless the weights are the "
            "same, its numbers mean nothing; fit it again",
            directory,
            model,
        )


def _check_asked_alike(
    directory: Path, fitted: Mapping[str, object], settings: Mapping[str, Any]
) -> None:
    """Raise :class:`UserError` if the answers were asked otherwise than those that were fitted.
    Samples without ``settings`` do not say how they were asked.
    """
    for name in _ASKED:
        unsaid = _USUAL.get(name, fitted[name]) if settings else fitted[name]
        now = settings.get(name, unsaid)
        if now != fitted[name]:
            raise UserError(
                f"{directory} was fitted on answers asked with {name}={fitted[name]}, these were "
                f"with {now}; fit an adapter on such answers"
            )


def _write_read(
    args: argparse.Namespace, read: Sequence[tuple[Sample, Reading | None]], marker: str
) -> None:
    """Write the samples with what was read, and the demonstrations, and say so. Raises
    :class:`UserError` if there is nothing to demonstrate.
    """
    from megatron_dcpo.evaluation.restated import write_restated
    from megatron_dcpo.evaluation.samples import write_samples

    by = args.read or "mean"
    measured = with_readings(read, by)
    write_samples(measured, Path(args.out))
    facts = {"samples": args.out, "n": len(read), "read": by}
    known = sum(reading is not None for _, reading in read)
    lines = [
        f"{known} of {len(read)} responses have a confidence, {_READ_AS[by]}; wrote {args.out}"
    ]
    if args.demonstrations:
        restated = write_restated(measured, Path(args.demonstrations), marker)
        if not restated:
            raise UserError(
                f"--demonstrations: none of the {len(read)} answers states a number in the form "
                f"that is read, so that there is none to learn; {args.out} is written"
            )
        facts |= {"demonstrations": args.demonstrations, "restated": restated}
        lines.append(
            f"{restated} of them again with that number, those that state one in the form that is "
            f"read; wrote {args.demonstrations}"
        )
    print(json.dumps(facts) if args.json else "\n".join(lines))


def with_readings(read: Sequence[tuple[Sample, Reading | None]], by: str) -> list[Sample]:
    """Return the samples with ``posthoc_confidence``, read as ``by`` says (``READINGS``)."""
    found = []
    for sample, reading in read:
        confidence = None if reading is None else reading.by(by)
        found.append(sample.measured(posthoc_confidence=confidence, posthoc_by=f"adapter, {by}"))
    return found


def _configured(
    args: argparse.Namespace, settings: Mapping[str, Any], run_dir: str, adapter: Mapping[str, Any]
) -> SupervisedConfig:
    """Return the configuration of the training, or of what is read out of its adapter."""
    from megatron_dcpo.config import merged, overridden, parse_overrides
    from megatron_dcpo.config.supervised import validate_supervised

    own: dict[str, Any] = {
        "run_dir": run_dir,
        "seed": args.seed,
        "model": {"path": args.model, "adapter": dict(adapter)},
        "data": {
            "path": args.samples[0],
            "template": settings.get("template", "paper"),
            "thinking": settings.get("thinking", "off"),
        },
    }
    values = merged(DEFAULTS, own)
    if args.resume:
        values = overridden(values, "training.resume", args.resume)
    for name, value in parse_overrides(args.overrides).items():
        _check_is_read(name, applies=bool(args.apply))
        values = overridden(values, name, value)
    if args.held_out and not args.apply:
        path = {"path": args.samples[0]}
        values["evaluation"] = {"interval": 10**9, **values.get("evaluation", {}), **path}
    return validate_supervised(values, "dcpo calibrate")


def _check_is_read(option: str, *, applies: bool) -> None:
    """Raise :class:`UserError` for an option of ``dcpo sft`` that would be ignored here, or that a
    flag sets.
    """
    if option in _FLAGS:
        raise UserError(f"{option}: dcpo calibrate takes it from {_FLAGS[option]}; remove it")
    if applies and not option.startswith(_OF_APPLY):
        raise UserError(f"{option} changes nothing about what --apply reads out; remove it")
    if option.startswith(_NOT_OF_A_FIT):
        raise UserError(f"{option} is of demonstrations, and --samples are none; remove it")


def _settings_of(paths: Sequence[str]) -> dict[str, Any]:
    """Return how the samples were asked, {} if nothing says it. Raises :class:`UserError` if
    several files differ in what decides a prompt.
    """
    from megatron_dcpo.evaluation.samples import settings_next_to

    found = [settings_next_to(path) or {} for path in paths]
    for name in _ASKED:
        if len({str(settings.get(name)) for settings in found}) > 1:
            raise UserError(
                f"--samples: the files were asked with different settings ({name}); fit one "
                "adapter on each"
            )
    agents = sorted({str(settings["agent"]) for settings in found if "agent" in settings})
    if agents:
        raise UserError(
            f"--samples: the answers were made by {agents[0]}, whose turns the samples do not "
            "hold; an adapter reads answers that follow the problem"
        )
    return found[0]


def _asking(settings: Mapping[str, Any], decimals: int) -> Asking:
    from megatron_dcpo.evaluation.samples import DATE
    from megatron_dcpo.runtime.run_records import parse_date
    from megatron_dcpo.training.confidence_adapter import Asking

    return Asking(
        marker=str(settings.get("marker", CONFIDENCE_TAG)),
        date=parse_date(settings.get(DATE)),
        decimals=decimals,
    )
