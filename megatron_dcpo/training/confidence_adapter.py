"""A confidence with its own parameters: a low-rank adapter that learns, on labelled answers,
what the model states behind its confidence tag, and changes nothing before it.

    fit(config, samples, options)     -> the held-out samples, with the confidence of the adapter
    read_out(config, samples, ...)    -> other samples with the confidence of a fitted adapter

The answers are those of any policy: a file of ``dcpo evaluate``, sampled here or by a server. They
stand as they are, so their accuracy is what it was. The loss is the expected Brier score over all
confidences (``objectives/expected_brier.py``), or the cross-entropy of one number as text
(``--target text``). The confidence that is read out is the mean over all of them, or the most
probable one (``greedy``).
"""

from __future__ import annotations

import datetime
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.config.supervised import SupervisedConfig
from megatron_dcpo.data.problem_kinds import KIND, kind_of
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import posthoc
from megatron_dcpo.evaluation.before_number import BeforeNumber, RenderedAs
from megatron_dcpo.evaluation.model_files import digest_of_files, files_of
from megatron_dcpo.evaluation.samples import Sample, shortened
from megatron_dcpo.objectives.expected_brier import EXPECTED_BRIER
from megatron_dcpo.objectives.supervised import find_loss
from megatron_dcpo.policy.adapter import AdapterOptimizer
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import Offload
from megatron_dcpo.runtime import distributed, hub
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.run_lock import lock_run_dir
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.training.candidates import Candidates, JudgedAnswer, TextAnswer
from megatron_dcpo.training.provenance import with_model_here
from megatron_dcpo.training.run import build_optimizer, open_topology
from megatron_dcpo.training.supervised import (
    SupervisedInputs,
    build,
    logprobs_of,
    read_model,
    train_all_steps,
)
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.training.weight_sync import DIRECTORY, export_adapter

logger = logging.getLogger(__name__)

FEWEST_LABELS = 50
CORRECT = "correct"
ENOUGH_ANSWERS = 2000  # with fewer it is said that they are few
TARGETS = ("brier", "text")
READINGS = ("mean", "greedy")
DESCRIPTION = "confidence.json"  # next to adapter/


@dataclass(frozen=True)
class Asking:
    """How the samples were asked: what has to be the same when a confidence is learned and read."""

    marker: str
    date: datetime.date | None = None
    decimals: int = 2  # of a stated confidence


@dataclass(frozen=True)
class FitOptions:
    """``teacher``: what the confidence is to be, ``correct`` (1 if the answer is right) or what a
    logistic regression says that reads this source (:func:`taught`). The share ``held_out`` of the
    problems is not fitted. ``target``, one of :data:`TARGETS`: the expected Brier score over all
    confidences, or the nearest number as text. ``kinds``: what the kinds of problem are named by
    (``evaluation.kinds``).
    """

    teacher: str = CORRECT
    held_out: float = 0.2
    seed: int = 0
    target: str = "brier"
    kinds: str = ""


@dataclass(frozen=True)
class Reading:
    """What an adapter says of an answer: the ``mean`` of all confidences by their probabilities,
    the most probable one (``greedy``), and the probability of all of them together (``mass``).
    """

    mean: float
    greedy: float
    mass: float

    def by(self, name: str) -> float:
        """Return the value of one of :data:`READINGS`."""
        return {"mean": self.mean, "greedy": self.greedy}[name]


def fit(
    config: SupervisedConfig, samples: Sequence[Sample], asking: Asking, options: FitOptions
) -> list[tuple[Sample, Reading | None]]:
    """Train the adapter of ``config.model.adapter`` on the problems that are not held out, and
    return the held-out samples with what it says of them, None of an answer that is not finished.
    Collective.

    Leaves ``adapter/`` and ``confidence.json`` in ``config.run_dir``, beside what a training leaves
    there. Raises :class:`UserError` for samples that there is nothing to learn from.
    """
    check_labels(samples)
    config = with_model_here(config)
    is_held_out = [
        posthoc.is_held_out(posthoc.problem_of(sample), options.held_out, options.seed)
        for sample in samples
    ]
    fitted = [s for s, out in zip(samples, is_held_out, strict=True) if not out]
    others = [s for s, out in zip(samples, is_held_out, strict=True) if out]
    if options.held_out and not others:
        raise UserError("no problem is held out; give more problems, or another --held-out")
    check_labels(fitted)
    targets = correctness(fitted)
    if options.teacher != CORRECT:
        targets = taught(fitted, options.teacher, options.seed)
    made = list(zip(fitted, answers_of(config, fitted, asking, targets), strict=True))
    learned = [answer for _, answer in made if answer is not None]
    if not learned:
        raise UserError("none of the responses is finished: nothing to learn from")
    measured = answers_of(config, others, asking, correctness(others))
    answers = FittedAnswers.of(
        [sample for sample, answer in made if answer is not None], options.kinds
    )
    warn_of_fit(answers, others)
    inputs = _inputs(learned, [each for each in measured if each is not None], options.target)
    with (
        build(config, inputs) as run,
        lock_run_dir(run.records.directory, run.policy.topology.rank),
    ):
        train_all_steps(run)
        assert isinstance(run.optimizer, AdapterOptimizer)
        directory = run.records.directory
        export_adapter(directory, config.model, run.optimizer.adapter)
        if run.policy.topology.rank == 0:
            _describe(directory, config, asking, options, answers)
        readings = _readings(run.trainer, measured, config.data.examples_per_step)
        distributed.barrier()
    return list(zip(others, readings, strict=True))


def _inputs(
    learned: Sequence[JudgedAnswer], measured: Sequence[JudgedAnswer], target: str
) -> SupervisedInputs:
    """Return what is trained on, and measured on held-out answers by the expected Brier score."""
    if target == "text":
        return SupervisedInputs(
            loss=find_loss("cross_entropy"),
            examples=[TextAnswer(answer) for answer in learned],
            held_out=measured,
        )
    return SupervisedInputs(loss=EXPECTED_BRIER, examples=learned, held_out=measured)


def read_out(
    config: SupervisedConfig, samples: Sequence[Sample], asking: Asking
) -> list[Reading | None]:
    """Return what the adapter at ``config.model.adapter.path`` says of every sample, None of an
    answer that is not finished. Collective.
    """
    config = with_model_here(config)
    answers = answers_of(config, samples, asking, correctness(samples))
    topology = open_topology(config)
    policy = build_policy(config.model, config.parallel, topology, training=False)
    optimizer = build_optimizer(config, policy)
    Offload(policy, optimizer.megatron, wanted=False).reload()
    trainer = Trainer(
        policy=policy,
        optimizer=optimizer,
        parallel=config.parallel,
        training=config.training,
    )
    return _readings(trainer, answers, config.data.examples_per_step)


def _readings(
    trainer: Trainer, answers: Sequence[JudgedAnswer | None], at_once: int
) -> list[Reading | None]:
    known = [answer for answer in answers if answer is not None]
    rows = iter(logprobs_of(trainer, known, at_once))
    readings: list[Reading | None] = []
    for answer in answers:
        if answer is None:
            readings.append(None)
            continue
        probabilities = answer.probabilities(next(rows))
        readings.append(reading_of(probabilities, answer.candidates.confidences))
    return readings


def reading_of(probabilities: np.ndarray, confidences: np.ndarray) -> Reading | None:
    """Return the reading of the ``confidences`` [C] by their probabilities [C]; None if these are
    all 0.
    """
    mass = float(probabilities.sum())
    if not mass > 0:
        return None
    mean = float(probabilities @ confidences / mass)
    greedy = float(confidences[int(probabilities.argmax())])
    return Reading(mean=min(mean, 1.0), greedy=greedy, mass=mass)


# ----------------------------------------------------------------------------------------- answers
def correctness(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for each right sample and 0 for each wrong one."""
    return [float(sample.correct) for sample in samples]


def answers_of(
    config: SupervisedConfig, samples: Sequence[Sample], asking: Asking, targets: Sequence[float]
) -> list[JudgedAnswer | None]:
    """Return an answer for each sample, with its target; None for one that is not finished or too
    long. Raises :class:`UserError` if a sample was asked something else than is put here.
    """
    tokenizer, arch = read_model(config)
    candidates = Candidates.of(tokenizer, asking.marker, asking.decimals)
    longest_number = max(len(branch.before) for branch in candidates.branches)
    most_tokens = min(config.data.max_length, arch.max_position_embeddings)
    before_number = BeforeNumber(
        tokenizer=tokenizer,
        rendered_as=RenderedAs(
            marker=asking.marker,
            template=config.data.template,
            thinking=config.data.thinking,
            date=asking.date,
        ),
        opening=candidates.opening,
        most_tokens=most_tokens - longest_number,
    )
    answers: list[JudgedAnswer | None] = []
    token_ids = before_number.token_ids(samples)
    for sample, ids, target in zip(samples, token_ids, targets, strict=True):
        if ids is None:
            answers.append(None)
            continue
        answers.append(
            JudgedAnswer(name=sample.name, token_ids=ids, target=target, candidates=candidates)
        )
    return answers


# ------------------------------------------------------------------------------ labels and teacher
def check_labels(samples: Sequence[Sample]) -> None:
    """Raise :class:`UserError` if there are too few labels, or only right or only wrong answers."""
    if len(samples) < FEWEST_LABELS:
        raise UserError(
            f"{len(samples)} labelled answers are too few to fit an adapter; give at least "
            f"{FEWEST_LABELS}"
        )
    outcomes = {sample.correct for sample in samples}
    if len(outcomes) == 1:
        outcome = "correct" if outcomes.pop() else "wrong"
        raise UserError(f"every response is {outcome}: nothing to learn from")


def taught(samples: Sequence[Sample], teacher: str, seed: int) -> list[float]:
    """Return what a logistic regression that was fitted on other problems says of each sample, by
    the source that it reads (``posthoc.cross_fitted``); of a sample without these inputs, whether
    it is right.

    Its expectation is that of the correctness, and it varies less; a target that mixes in the mean
    of the problem's own verdicts would not have that expectation.
    """
    column = posthoc.task_column(teacher)
    if column and all(kind_of(sample.prompt, column) is None for sample in samples):
        raise UserError(
            f"--teacher {teacher}: the problems name no kinds; add a column kind to the data and "
            "sample again, or give --teacher reasoning or states"
        )
    predictions = posthoc.cross_fitted(samples, teacher, seed)
    if all(prediction is None for prediction in predictions):
        raise UserError(
            f"--teacher {teacher}: none of the responses has {posthoc.needs_of(teacher)}"
        )
    return [
        float(sample.correct) if prediction is None else prediction
        for sample, prediction in zip(samples, predictions, strict=True)
    ]


# ----------------------------------------------------------------------------- what it is fitted on
@dataclass(frozen=True)
class FittedAnswers:
    """The answers that an adapter was fitted on: their number, the number of each kind of problem,
    and what the kinds are named by; no kinds where the problems name none.
    """

    count: int
    kinds: Mapping[str, int]
    kinds_by: str

    @classmethod
    def of(cls, samples: Sequence[Sample], kinds_by: str) -> FittedAnswers:
        named = [kind_of(sample.prompt, kinds_by or KIND) for sample in samples]
        kinds = Counter(kind for kind in named if kind is not None)
        return cls(count=len(samples), kinds=dict(sorted(kinds.items())), kinds_by=kinds_by)

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> FittedAnswers:
        """Return those in the description of an adapter, which may be of an earlier release."""
        return cls(
            count=int(description["answers"]),
            kinds=description.get("kinds", {}),
            kinds_by=description.get("kinds_by", ""),
        )


def warn_of_fit(fitted: FittedAnswers, tested: Sequence[Sample]) -> None:
    """Warn if few answers were fitted, and if some of the ``tested`` are of kinds that were not."""
    if fitted.count < ENOUGH_ANSWERS:
        logger.warning(
            "the adapter is fitted on %d answers; with fewer than %d it may know less than the "
            "lookup of the kinds of problem",
            fitted.count,
            ENOUGH_ANSWERS,
        )
    kinds = [kind_of(sample.prompt, fitted.kinds_by or KIND) for sample in tested]
    new = Counter(kind for kind in kinds if kind is not None and kind not in fitted.kinds)
    if fitted.kinds and new:
        logger.warning(
            "%d of %d answers are to problems of kinds that the adapter was not fitted on: %s",
            new.total(),
            len(tested),
            shortened(sorted(new)),
        )


def _describe(
    directory: Path,
    config: SupervisedConfig,
    asking: Asking,
    options: FitOptions,
    answers: FittedAnswers,
) -> None:
    description = {
        "kind": "adapter",
        "model": hub.exact_name(config.model.path),
        "files": digest_of_files(files_of(config.model.path)),
        "template": config.data.template,
        "thinking": config.data.thinking,
        "marker": asking.marker,
        "decimals": asking.decimals,
        "teacher": options.teacher,
        "held_out": options.held_out,
        "seed": options.seed,
        "target": options.target,
        "answers": answers.count,
        "kinds": answers.kinds,
        "kinds_by": answers.kinds_by,
    }
    text = json.dumps(description, indent=1) + "\n"
    write_atomically(directory / DESCRIPTION, text)


def described(directory: Path) -> dict[str, object]:
    """Return what the adapter of :func:`fit` in ``directory`` was fitted on. Raises
    :class:`UserError` if it is none.
    """
    path = directory / DESCRIPTION
    if not path.is_file() or not (directory / DIRECTORY).is_dir():
        raise UserError(
            f"{directory}: no confidence adapter ({DESCRIPTION} and {DIRECTORY}/ are expected); "
            "dcpo calibrate --kind adapter makes one"
        )
    return read_json_object(path)


def adapter_of(directory: Path) -> str:
    """Return the directory of the adapter that :func:`fit` left in ``directory``."""
    return str(directory / DIRECTORY)
