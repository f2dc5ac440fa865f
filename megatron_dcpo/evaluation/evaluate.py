"""Sample a model on problems and judge what it says.

    prompts --respond--> responses --judge--> samples

The engine is passed in as a function; this module imports none. What is made of the samples is in
``scoring.py`` and ``results.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.measuring import measured_sample
from megatron_dcpo.evaluation.samples import (
    Origin,
    Sample,
    SampleLog,
    digest_asked,
    digest_judged,
    with_consistency,
    with_prompt,
)
from megatron_dcpo.judging.judge import Judge, judge_many, judging_threads, with_text
from megatron_dcpo.judging.math.pool import equivalent_math, verify_answers
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Judgement, Prompt, Response, ResponseKey

logger = logging.getLogger(__name__)

# an engine in this process, which yields responses to (prompt, repeat) as they finish
Stream = Callable[[Sequence[tuple[Prompt, int]]], Iterable[Sequence[Response]]]
# benchmark, finished samples, all samples
Progress = Callable[[str, int, int], None]
Equivalent = Callable[[str, str], bool]
# the share of a benchmark's prompts that a server may refuse before the evaluation ends
REFUSED_SHARE = 0.1


@dataclass(frozen=True)
class Request:
    """A problem and the repeats that are still to be sampled."""

    prompt: Prompt
    repeats: tuple[int, ...]


# responses with their text, in any order, a few at a time
Respond = Callable[[Sequence[Request]], Iterable[Sequence[Response]]]


JUDGE_OF_MATHEMATICS: Judge = partial(judge_many, verifier=verify_answers)


@dataclass(frozen=True)
class AnswerJudge:
    """A judge of responses, a test of whether two answers are equivalent, and the ``digest`` of the
    verifier ("" if it is not known), by which samples are known that were judged by another one.
    """

    judge: Judge = JUDGE_OF_MATHEMATICS
    equivalent: Equivalent = equivalent_math
    digest: str = ""


def evaluate_benchmark(
    prompts: Sequence[Prompt],
    respond: Respond,
    *,
    repeats: int,
    judged_by: AnswerJudge | None = None,
    keep_features: bool = False,
    log: SampleLog | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Sample every prompt of a benchmark ``repeats`` times and judge the responses while others are
    sampled.

    Responses are matched by prompt id and repeat, never by position, so that the samples do not
    depend on the order in which an engine finishes. Samples that ``log`` holds already are not
    drawn again. A new one is written to it as soon as it is judged, even if the engine fails later;
    a response that could not be judged gives none. Raises :class:`UserError` if a server refuses
    too many prompts (``REFUSED_SHARE``).
    """
    if not prompts:
        return []
    judged_by = judged_by or AnswerJudge()
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    collected = _Collected(by_id, repeats, judged_by, keep_features, log)
    collected.progress = progress
    collected.continue_from({} if log is None else log.finished(collected.benchmark))
    requests = _missing(prompts, repeats, collected.samples)
    judged: deque[tuple[Sequence[Response], Future[Sequence[Judgement | None]]]] = deque()
    with judging_threads() as threads:
        try:
            for responses in respond(requests) if requests else ():
                judged.append((responses, threads.submit(judged_by.judge, responses, by_id)))
                while judged and judged[0][1].done():
                    finished, judgements = judged.popleft()
                    collected.add(finished, judgements.result())
                    collected.check_refusals()
        finally:
            while judged:
                finished, judgements = judged.popleft()
                collected.add(finished, judgements.result())
    collected.check_refusals()
    position = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
    ordered = sorted(
        collected.samples.values(),
        key=lambda sample: (position[sample.prompt.prompt_id], sample.response.sample_index),
    )
    return with_consistency(ordered, judged_by.equivalent)


class _Collected:
    """The samples of a benchmark: those in the log and those that are added."""

    def __init__(
        self,
        prompts: Mapping[str, Prompt],
        repeats: int,
        judged_by: AnswerJudge,
        keep_features: bool,
        log: SampleLog | None,
    ) -> None:
        self.prompts = prompts
        self.repeats = repeats
        self.judged_by = judged_by
        self.keep_features = keep_features
        self.log = log
        self.progress: Progress | None = None
        self.benchmark = next(iter(prompts.values())).task
        self.samples: dict[ResponseKey, Sample] = {}
        self.origins: dict[str, Origin] = {}
        for prompt_id, prompt in prompts.items():
            self.origins[prompt_id] = Origin(
                asked=digest_asked(prompt), judged_by=digest_judged(prompt, judged_by.digest)
            )

    def continue_from(self, finished: Mapping[ResponseKey, Sample]) -> None:
        """Take the samples of an earlier evaluation that are responses to these prompts. Those that
        were judged by another key or verifier are judged again.
        """
        stale = []
        for key, sample in finished.items():
            prompt_id, repeat = key
            prompt = self.prompts.get(prompt_id)
            if prompt is None or repeat >= self.repeats:
                continue
            origin = self.origins[prompt_id]
            if sample.response.refusal or sample.origin.asked != origin.asked:
                continue
            is_current = sample.origin.judged_by == origin.judged_by
            sample = replace(with_prompt(sample, prompt), origin=origin)
            if is_current:
                self.samples[key] = sample
            else:
                stale.append(sample)
        if stale:
            logger.warning(
                "%s: judging %d saved samples again, because their keys or the verifier have "
                "changed; nothing is sampled for that",
                self.benchmark,
                len(stale),
            )
            for sample in rejudge(stale, self.judged_by):
                self.samples[sample.response.key] = sample
                if self.log is not None:
                    self.log.add(sample)
        self._show_progress()

    def add(self, responses: Sequence[Response], judgements: Sequence[Judgement | None]) -> None:
        """Add judged responses and write them to the log; those without a judgement are left
        out.
        """
        for response, judgement in zip(responses, judgements, strict=True):
            if judgement is None:
                continue
            prompt = self.prompts[response.prompt_id]
            sample = measured_sample(prompt, response, judgement, self.keep_features)
            sample = replace(sample, origin=self.origins[response.prompt_id])
            self.samples[response.key] = sample
            if self.log is not None:
                self.log.add(sample)
        self._show_progress()

    def check_refusals(self) -> None:
        """Raise :class:`UserError` if the server has refused every prompt, or more than
        ``REFUSED_SHARE`` of them (one prompt may always be refused).
        """
        refused = {}
        for sample in self.samples.values():
            if sample.response.refusal is not None:
                refused[sample.prompt.prompt_id] = sample.response.refusal
        allowed = max(1, int(REFUSED_SHARE * len(self.prompts)))
        if len(refused) > allowed or len(refused) == len(self.prompts):
            words = one_line(next(iter(refused.values())), 300)
            raise UserError(
                f"{self.benchmark}: the server has refused {len(refused)} of {len(self.prompts)} "
                f"prompts, the first with: {words}; correct evaluation.max_tokens, the prompts or "
                "the server; the same command asks the refused ones again"
            )

    def _show_progress(self) -> None:
        if self.progress is not None:
            total = len(self.prompts) * self.repeats
            self.progress(self.benchmark, len(self.samples), total)


def _missing(
    prompts: Sequence[Prompt], repeats: int, samples: Container[ResponseKey]
) -> list[Request]:
    """Return the prompts with the repeats that are not among the samples."""
    requests = []
    for prompt in prompts:
        left = tuple(n for n in range(repeats) if (prompt.prompt_id, n) not in samples)
        if left:
            requests.append(Request(prompt, left))
    return requests


def respond_at_once(stream: Stream, tokens: TokenBytes, eos_ids: Collection[int]) -> Respond:
    """Return an engine in this process as ``Respond``: it gets all requests together and decides
    itself how many run at once.

    ``eos_ids`` are the tokens that end a response, which are not part of its text.
    """

    def respond(requests: Sequence[Request]) -> Iterator[list[Response]]:
        asked: list[tuple[Prompt, int]] = []
        for request in requests:
            for repeat in request.repeats:
                asked.append((request.prompt, repeat))
        for responses in stream(asked):
            finished = []
            for response in responses:
                if response.text is None:
                    response = with_text(response, tokens, eos_ids)
                finished.append(response)
            yield finished

    return respond


def rejudge(samples: Sequence[Sample], judged_by: AnswerJudge | None = None) -> list[Sample]:
    """Return the same responses judged again, for instance by a better verifier, without those
    that could not be judged.

    A sample does not keep its tokens. Everything that depends on them, and the length of the
    thinking before the answer, is taken from the first judgement.
    """
    judged_by = judged_by or AnswerJudge()
    prompts: dict[str, Prompt] = {}
    responses = []
    for index, sample in enumerate(samples):
        prompt = sample.prompt
        row = prompt.row or {"problem": prompt.problem, "answer": prompt.ground_truth}
        prompt_id = str(index)  # two benchmarks may have problems of one id
        prompts[prompt_id] = replace(prompt, prompt_id=prompt_id, row=row)
        text = sample.response.text or ""
        answer = text[sample.judgement.thinking_characters :]
        responses.append(replace(sample.response, prompt_id=prompt_id, text=answer))
    judged = []
    for sample, judgement in zip(samples, judged_by.judge(responses, prompts), strict=True):
        if judgement is None:
            continue
        first = sample.judgement
        again = replace(
            judgement,
            prompt_id=first.prompt_id,
            boundary=first.boundary,
            length=first.length,
            sampled_tokens=first.sampled_tokens,
            marker_end=first.marker_end,
            thinking_tokens=first.thinking_tokens,
            thinking_characters=first.thinking_characters,
        )
        origin = replace(sample.origin, judged_by=digest_judged(sample.prompt, judged_by.digest))
        judged.append(replace(sample, judgement=again, origin=origin))
    return with_consistency(judged, judged_by.equivalent)
