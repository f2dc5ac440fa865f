"""The confidence of a choice: the judge's blocks, the measures of an evaluation, and a predictor
that was fitted on such measures. What cannot be computed is None, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_dcpo.calibration.selective import Threshold, threshold_for_risk
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.measuring import measured_sample
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.scoring import CONFIDENCE_KINDS
from megatron_dcpo.judging.answers import BOXED, FENCED, AnswerForm, Attempt, Outcome
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.judging.replies import UNREADABLE, response_of_choice
from megatron_dcpo.judging.thinking import KNOWN
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.calibrator import Calibrator
from megatron_dcpo.serving.finishing import why_not_whole
from megatron_dcpo.types import CONFIDENCE_TAG, ConfidenceStatus, Prompt, Response

# without a tokenizer, <think> is taken to open the thinking, as in an evaluation of a server
_TOKENS = TokenBytes((), KNOWN[0])
_ID = "served"
_LONGEST_REASON = 300  # characters: it may name what the client has sent
_WHY: Mapping[ConfidenceStatus, str] = {
    "missing": "the answer states no confidence",
    "multiple": "the answer has several confidence tags",
    "unparsable": "no number follows the confidence tag",
    "out_of_range": "the number after the confidence tag is not in [0, 1]",
    "trailing_text": "text follows the stated confidence",
    "before_box": "the answer follows the confidence instead of preceding it",
    "truncated": "the answer was cut off",
}


@dataclass(frozen=True)
class Scored:
    """The confidence of a choice, and how it came about.

    ``raw`` is the value before the predictor: the kind of confidence that it scales, or what the
    answer states. ``reason`` says why there is no confidence, "" if there is one; what stands
    before its colon is one of a few words. ``abstains`` is None if nothing was decided.
    ``has_block`` says that the text ends with a well-formed confidence block.
    """

    confidence: float | None
    raw: float | None
    source: str
    reason: str = ""
    abstains: bool | None = None
    has_block: bool = False

    def fields(self) -> dict[str, Any]:
        """Return what is added to the choice."""
        return {
            "confidence": self.confidence,
            "confidence_raw": self.raw,
            "confidence_source": self.source,
            "confidence_reason": one_line(self.reason, _LONGEST_REASON) or None,
            "confidence_abstains": self.abstains,
        }


# of a choice; whatever an upstream says under these names is not ours, and is not passed on
FIELDS = tuple(Scored(confidence=None, raw=None, source="").fields())


class Stated(NamedTuple):
    """The confidence that a model stated when it was asked behind an answer, None for a
    ``reason``.
    """

    confidence: float | None
    reason: str = ""


@dataclass(frozen=True)
class Scorer:
    """How choices are scored and shown. With ``keep_tag`` the confidence block stays in the text;
    ``abstention`` is a text that is added to an answer below the ``threshold``, "" for none.
    """

    calibrator: Calibrator | None = None
    marker: str = CONFIDENCE_TAG
    form: AnswerForm = BOXED
    keep_tag: bool = False
    threshold: Threshold | None = None
    abstention: str = ""

    @property
    def source(self) -> str:
        """Return what the confidence is: ``stated``, or the predictor."""
        return "stated" if self.calibrator is None else self.calibrator.name

    def score(
        self,
        asked: Asked,
        choice: Mapping[str, Any],
        unreadable: str = "",
        stated: Stated | None = None,
    ) -> Scored:
        """Return the confidence of a whole choice, with its log-probs, or with what was ``stated``
        behind one that states nothing; none if a part of it was ``unreadable``, for a reason.
        """
        try:
            sample = self._sample(asked, choice)
        except UNREADABLE as error:
            return self._none(f"unreadable: {type(error).__name__}")
        has_block = sample.judgement.status == "ok"
        if unreadable:
            return self._none(f"unreadable: {unreadable}", has_block=has_block)
        if stated is None or has_block:
            missing = self._missing(asked, choice, sample)
        else:
            sample = sample.at_turn(sample.turn, stated.confidence)
            missing = stated.reason
        raw = self._raw(sample)
        reason = asked.refusal or missing
        if reason:
            return self._none(reason, raw, has_block)
        confidence = raw
        if self.calibrator is not None:
            confidence = self._predicted(sample)
        if confidence is None:
            return self._none(_why_no_inputs(sample.response), raw, has_block)
        abstains = None
        if self.threshold is not None:
            abstains = confidence < self.threshold.confidence
        return Scored(
            confidence=confidence,
            raw=raw,
            source=self.source,
            abstains=abstains,
            has_block=has_block,
        )

    def _none(self, reason: str, raw: float | None = None, has_block: bool = False) -> Scored:
        return Scored(None, raw, self.source, reason=reason, has_block=has_block)

    def _sample(self, asked: Asked, choice: Mapping[str, Any]) -> Sample:
        """Return a choice as a sample of an evaluation, whose answer nobody has judged."""
        prompt = Prompt(
            prompt_id=_ID,
            messages=(),
            token_ids=(),
            ground_truth="",
            task=asked.labels.get("task", ""),
            kind=asked.labels.get("kind"),
            row=asked.labels,
        )
        tops = 0 if self.calibrator is None else self.calibrator.top_logprobs
        response = response_of_choice(_ID, 0, choice, asked.api, tops)
        judgement = judge_many(
            [response],
            {_ID: prompt},
            _TOKENS,
            marker=self.marker,
            verifier=_not_judged,
            form=self.form,
        )[0]
        assert judgement is not None, "nothing is verified"
        if asked.turn is not None:
            response = replace(response, counted={"turns": float(asked.turn)})
        return measured_sample(prompt, response, judgement, keep_features=tops > 0)

    def _raw(self, sample: Sample) -> float | None:
        kind = "verbal"
        if self.calibrator is not None:
            source = self.calibrator.predictor.source
            kind = source if source in CONFIDENCE_KINDS else kind
        return _finite(CONFIDENCE_KINDS[kind](sample))

    def _missing(self, asked: Asked, choice: Mapping[str, Any], sample: Sample) -> str:
        """Return why a sample lacks what the confidence is computed from, "" if it does not."""
        if not sample.response.text:
            return "no_text: the answer has no text, as a call of a tool has none"
        calibrator = self.calibrator
        fitted = () if calibrator is None else calibrator.finish_reasons
        reason = why_not_whole(choice, fitted)
        if reason:
            return reason
        if calibrator is None or not calibrator.reads_logprobs:
            return why_malformed(sample.judgement.status)
        if not choice.get("logprobs"):
            return "no_logprobs: the upstream returned no log-probs"
        if calibrator.column is None:
            return ""
        task = asked.labels.get(calibrator.column)
        if task is None:
            return (
                f"no_task: the predictor reads the task from metadata.{calibrator.column} of the "
                "request"
            )
        if not calibrator.knows_task(task):
            return f"no_task: {calibrator.column} {task!r:.100} was not fitted"
        return ""

    def _predicted(self, sample: Sample) -> float | None:
        assert self.calibrator is not None
        try:
            return _finite(self.calibrator.predictor.predict([sample])[0])
        except UserError:
            return None

    def shown(self, text: str, asked: Asked, scored: Scored) -> str:
        """Return the text of an answer as the client gets it.

        A client that asks for the log-probs gets the text that its tokens make up. Only a
        well-formed block is taken out, so that nothing else is lost.
        """
        if asked.shows_logprobs:
            return text
        if scored.has_block and not self.keep_tag:
            text = text[: text.rfind(self.marker)]
        if scored.abstains and self.abstention and text:
            text = f"{text}\n\n{self.abstention}"
        return text


def why_malformed(status: ConfidenceStatus) -> str:
    """Return the reason of a status, "" if the confidence is well-formed."""
    return "" if status == "ok" else f"{status}: {_WHY[status]}"


def _why_no_inputs(response: Response) -> str:
    """Return why a predictor has no number for a response."""
    if response.token_ends is None:
        return "no_inputs: the tokens do not make up the text, as behind a reasoning parser"
    return "no_inputs: the predictor lacks inputs"


def _finite(value: float | None) -> float | None:
    """Return a number that JSON has, None for any other."""
    if value is None or not math.isfinite(value):
        return None
    return value


def _not_judged(attempts: Sequence[Attempt]) -> list[Outcome]:
    return [Outcome(correct=False) for _ in attempts]


def form_of_fit(calibrator: Calibrator | None) -> AnswerForm:
    """Return the form of the answers that were fitted: programs, or boxes and anything else."""
    if calibrator is None or calibrator.record is None:
        return BOXED
    fitted_on = calibrator.record.fitted_on
    if fitted_on is not None and fitted_on.forms == ("code",):
        return FENCED
    return BOXED


def choose_threshold(calibrator: Calibrator | None, path: str, risk: float) -> Threshold:
    """Return the threshold for a risk, chosen on the held-out answers of the fit. Raises
    :class:`UserError` if there is none.
    """
    if calibrator is None:
        raise UserError(
            "--abstain-above needs --calibrator: the risk of a stated confidence is not known"
        )
    if not 0.0 < risk < 1.0:
        raise UserError(f"--abstain-above {risk:g}: a risk is between 0 and 1")
    record = calibrator.record
    if record is None or not len(record.held_out_correct):
        raise UserError(
            f"{path}: --abstain-above needs answers that were held out of the fit; fit it again "
            "with --held-out above 0"
        )
    threshold = threshold_for_risk(
        record.held_out_confidences, record.held_out_correct, risk, record.held_out_problems
    )
    if threshold is None:
        raise UserError(
            f"--abstain-above {risk:g}: at every threshold more than {100 * risk:g} % of the "
            f"{len(record.held_out_correct)} held-out answers that are left are wrong; state a "
            "higher risk"
        )
    return threshold
