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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config.supervised import SupervisedConfig
from megatron_dcpo.data import prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import posthoc
from megatron_dcpo.evaluation.kinds import KIND, kind_of
from megatron_dcpo.evaluation.samples import Sample, digest_asked, shortened
from megatron_dcpo.objectives.expected_brier import EXPECTED_BRIER
from megatron_dcpo.objectives.supervised import find_loss
from megatron_dcpo.policy.adapter import AdapterOptimizer
from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import Offload
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.run_lock import lock_run_dir
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.training.candidates import Candidates, JudgedAnswer, TextAnswer
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
from megatron_dcpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FEWEST_LABELS = 50
ENOUGH_ANSWERS = 2000  # with fewer it is said that they are few
FOLDS = 5
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
    """``teacher``: what the confidence is to be, ``correct`` (1 if the answer is right) or
    ``logistic`` (:func:`taught`). The share ``held_out`` of the problems is not fitted. ``target``,
    one of :data:`TARGETS`: the expected Brier score over all confidences, or the nearest number as
    text. ``kinds``: what the kinds of problem are named by (``evaluation.kinds``).
    """

    teacher: str = "correct"
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
    tokenizer, arch = read_model(config)
    is_held_out = [
        posthoc.is_held_out(posthoc.problem_of(sample), options.held_out, options.seed)
        for sample in samples
    ]
    fitted = [s for s, out in zip(samples, is_held_out, strict=True) if not out]
    others = [s for s, out in zip(samples, is_held_out, strict=True) if out]
    if options.held_out and not others:
        raise UserError("no problem is held out; give more problems, or another --held-out")
    check_labels(fitted)
    targets = [float(sample.correct) for sample in fitted]
    if options.teacher == "logistic":
        targets = taught(fitted, options.seed)
    maker = AnswerMaker.of(config, tokenizer, arch, asking)
    made = list(zip(fitted, maker.answers(fitted, targets), strict=True))
    learned = [answer for _, answer in made if answer is not None]
    if not learned:
        raise UserError("none of the responses is finished: nothing to learn from")
    measured = maker.answers(others, [float(sample.correct) for sample in others])
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
    tokenizer, arch = read_model(config)
    answers = AnswerMaker.of(config, tokenizer, arch, asking).answers(
        samples, [float(sample.correct) for sample in samples]
    )
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
@dataclass(frozen=True)
class AnswerMaker:
    """Makes answers of samples: the tokens of what was asked and answered, up to the number."""

    config: SupervisedConfig
    tokenizer: PreTrainedTokenizerBase
    candidates: Candidates
    asking: Asking
    most_tokens: int

    @classmethod
    def of(
        cls,
        config: SupervisedConfig,
        tokenizer: PreTrainedTokenizerBase,
        arch: Architecture,
        asking: Asking,
    ) -> AnswerMaker:
        return cls(
            config=config,
            tokenizer=tokenizer,
            candidates=Candidates.of(tokenizer, asking.marker, asking.decimals),
            asking=asking,
            most_tokens=min(config.data.max_length, arch.max_position_embeddings),
        )

    def answers(
        self, samples: Sequence[Sample], targets: Sequence[float]
    ) -> list[JudgedAnswer | None]:
        """Return an answer for each sample; None for one that is not finished or too long. Raises
        :class:`UserError` if a sample was asked something else than is put here.
        """
        found: list[JudgedAnswer | None] = []
        asked: dict[tuple[str, str], tuple[int, ...]] = {}
        for sample, target in zip(samples, targets, strict=True):
            if sample.problem_key not in asked:
                asked[sample.problem_key] = self._asked(sample)
            found.append(self._answer(sample, asked[sample.problem_key], target))
        unfinished = sum(s.response.finish_reason != "stop" for s in samples)
        if unfinished:
            logger.warning(
                "%d of %d responses are not finished and have no confidence",
                unfinished,
                len(samples),
            )
        too_long = found.count(None) - unfinished
        if too_long:
            logger.warning(
                "%d responses are longer than %d tokens with their prompt "
                "(data.max_length) and have no confidence",
                too_long,
                self.most_tokens,
            )
        return found

    def _answer(
        self, sample: Sample, prompt_ids: tuple[int, ...], target: float
    ) -> JudgedAnswer | None:
        if sample.response.finish_reason != "stop":
            return None
        text = sample.response.text or ""
        # the newline before the tag keeps the tokens of the answer apart from it
        before_tag = text.partition(self.asking.marker)[0].rstrip() + "\n"
        ids = self.tokenizer.encode(before_tag, add_special_tokens=False)
        answer = JudgedAnswer(
            name=f"{posthoc.problem_of(sample)}/{sample.response.sample_index}",
            token_ids=(*prompt_ids, *ids, *self.candidates.opening),
            target=target,
            candidates=self.candidates,
        )
        return answer if answer.length <= self.most_tokens else None

    def _asked(self, sample: Sample) -> tuple[int, ...]:
        """Return the tokens of the prompt, and check that they are what the sample was asked."""
        data = self.config.data
        problem = sample.prompt.problem
        if not problem:
            raise UserError(
                f"the samples do not hold the problems ({sample.prompt.prompt_id}); sample them "
                "again with this release"
            )
        messages, ids = prompts.render(
            self.tokenizer,
            ({"role": "user", "content": problem},),
            data.template,
            self.asking.marker,
            sample.prompt.form,
            data.thinking,
            self.asking.date,
        )
        with_tokens = Prompt(
            prompt_id="", messages=messages, token_ids=tuple(ids), ground_truth="", task=""
        )
        as_messages = replace(with_tokens, token_ids=())
        known = {digest_asked(with_tokens), digest_asked(as_messages)}
        if sample.origin.asked is not None and sample.origin.asked not in known:
            raise UserError(
                f"{sample.prompt.prompt_id} was asked with another prompt than "
                f"data.template={data.template} makes of it here; name the template that it was "
                "asked with (and the tokenizer's directory as --model)"
            )
        return tuple(ids)


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


def taught(samples: Sequence[Sample], seed: int) -> list[float]:
    """Return what a logistic regression that was fitted on other problems says of each sample
    (cross-fitting over :data:`FOLDS` parts of the problems); of a sample without log-probs, whether
    it is right.

    It reads the log-probs of the reasoning, the length, the task, and the share of the problem's
    other answers that are equivalent. Its expectation is that of the correctness, and it varies
    less; a target that mixes in the mean of the problem's own verdicts would not have that
    expectation.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    targets = np.array([float(sample.correct) for sample in samples])
    inputs, known = posthoc.inputs_of(samples, "reasoning")
    if not len(known):
        raise UserError(
            "--teacher logistic: none of the responses has log-probs of its reasoning; sample them "
            "with dcpo evaluate --model, or from an endpoint that returns log-probs"
        )
    labelled = [samples[index] for index in known]
    tasks = [str(sample.prompt.kind) for sample in labelled]
    inputs = posthoc.with_tasks(inputs, tasks, np.array(sorted(set(tasks))))
    inputs = np.column_stack([inputs, _agreement(labelled)])
    correct = targets[known]
    folds = np.array([_fold(posthoc.problem_of(sample), seed) for sample in labelled])
    for fold in np.unique(folds):
        inside = folds == fold
        if len(set(correct[~inside])) < 2:
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        model.fit(inputs[~inside], correct[~inside])
        targets[known[inside]] = model.predict_proba(inputs[inside])[:, 1]
    return targets.tolist()


def _agreement(samples: Sequence[Sample]) -> np.ndarray:
    """Return the share of the problem's other answers that are equivalent to each one, float64 [N];
    one half where there is no answer, or no other one.
    """
    repeats = Counter(sample.problem_key for sample in samples)
    found = []
    for sample in samples:
        share = sample.measures.consistency_confidence  # of all answers, its own too
        count = repeats[sample.problem_key]
        agreement = 0.5
        if share is not None and count > 1:
            agreement = min(max((share * count - 1) / (count - 1), 0.0), 1.0)
        found.append(agreement)
    return np.array(found)


def _fold(problem: str, seed: int) -> int:
    for fold in range(FOLDS - 1):
        share = (fold + 1) / FOLDS
        if posthoc.is_held_out(f"fold/{problem}", share, seed):
            return fold
    return FOLDS - 1


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
        "model": config.model.path,
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
