"""Turn a response into a judgement: the boundary of its blocks, whether its answer is right, and
the confidence that it states.

Training (sampled token ids) and evaluation (text from a server or from the file of an earlier
evaluation) share this judge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from megatron_dcpo.data.chat_template import PROMPT_TOKENS
from megatron_dcpo.judging.abstention import is_abstention
from megatron_dcpo.judging.answers import BOXED, AnswerForm, Attempt, Verifier
from megatron_dcpo.judging.blocks import Split, ends_of_tokens, split_blocks, split_text
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.thinking import answer_start
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import CONFIDENCE_TAG, Judgement, Prompt, Response

# gets the prompts by their ids
Judge = Callable[[Sequence[Response], Mapping[str, Prompt]], Sequence[Judgement | None]]


@contextmanager
def judging_threads() -> Iterator[Executor]:
    """Open threads that wait for the judge's processes, so that a slow response does not hold up
    the others. At the end of the block, what has not begun is given up and nothing is waited for.
    """
    threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="judge")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def judge_many(
    responses: Sequence[Response],
    prompts: Mapping[str, Prompt],
    tokens: TokenBytes | None = None,
    eos_ids: Collection[int] = (),
    *,
    verifier: Verifier,
    marker: str = CONFIDENCE_TAG,
    form: AnswerForm = BOXED,
) -> list[Judgement | None]:
    """Judge responses to their prompts, which ``prompts`` holds by id, by a ``verifier``;
    None stands for a response that the verifier could not judge.

    A response with ``text`` is judged by its text, every other one by its token ids, which needs
    ``tokens`` and ``eos_ids``. Of a response of several turns the last answer is judged
    (``Response.answer_from``); what is before it reasons. The answer is read in the reasoning block
    only, so that no confidence token can change R, and after the thinking, if the tokenizer of
    ``tokens`` has a token that ends it. A response that closes with an EOS is finished whatever the
    engine reports.
    """
    splits = []
    attempts = []
    for response in responses:
        prompt = prompts[response.prompt_id]
        split = _split(response, prompt, tokens, eos_ids, marker, form)
        splits.append(split)
        reasoning = split.reasoning.decode(errors="replace")
        answer = form.extract(reasoning)
        attempts.append(
            Attempt(
                answer=answer,
                truth=prompt.ground_truth,
                reasoning=reasoning,
                row=prompt.row,
                verdict=response.verdict,
            )
        )
    judgements: list[Judgement | None] = []
    for response, split, attempt, outcome in zip(
        responses, splits, attempts, verifier(attempts), strict=True
    ):
        if outcome is None:
            judgements.append(None)
            continue
        finished = split.ended or response.finish_reason == "stop"
        text = split.answer.decode(errors="replace")
        parsed = parse_confidence(text, marker=marker, finished=finished, opener=form.opener)
        has_answer = split.start is not None
        judgements.append(
            Judgement(
                prompt_id=response.prompt_id,
                correct=float(outcome.correct),
                confidence=parsed.confidence,
                status=parsed.status,
                boundary=_behind(response.answer_from, split.boundary),
                length=_length(response),
                stated=parsed.stated,
                answered=has_answer and form.opener.encode() in split.reasoning,
                marker_end=_behind(response.answer_from, split.marker_end),
                answer=attempt.answer,
                category=outcome.category,
                score=outcome.score,
                logged=outcome.logged,
                abstained=not outcome.correct and is_abstention(attempt.answer),
                thinking_tokens=split.thinking,
                thinking_characters=_characters(response, split),
                sampled_tokens=None if response.loss_mask is None else response.sampled_length,
            )
        )
    return judgements


def judge_by_task(
    responses: Sequence[Response],
    prompts: Mapping[str, Prompt],
    judges: Mapping[str, Callable[..., Sequence[Judgement | None]]],
    **options: object,
) -> list[Judgement | None]:
    """Return the judgements of responses to problems of several sources, in order. The judge of its
    task judges each response and also gets the ``options``.
    """
    of_task: dict[str, list[int]] = {}
    for index, response in enumerate(responses):
        of_task.setdefault(prompts[response.prompt_id].task, []).append(index)
    judged: dict[int, Judgement | None] = {}
    for task, indices in of_task.items():
        task_responses = [responses[index] for index in indices]
        judgements = judges[task](task_responses, prompts, **options)
        judged.update(zip(indices, judgements, strict=True))
    return [judged[index] for index in range(len(responses))]


def with_text(response: Response, tokens: TokenBytes, eos_ids: Collection[int]) -> Response:
    """Return a copy of the response with its ``text``, decoded byte by byte without the end token;
    other special tokens stay. Of a response of several turns the last answer alone is kept.

    ``finish_reason`` becomes ``stop`` if an EOS closes the response, so that the text is judged as
    the ids are.
    """
    response = _last_answer(response)
    ids = response.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in eos_ids
    pieces = tokens.pieces(ids[: len(ids) - ended])
    text = b"".join(pieces).decode(errors="replace")
    lengths = [len(piece) for piece in pieces]
    if ended:
        lengths.append(1)
    ends = ends_of_tokens(lengths, text)
    return replace(
        response,
        text=text,
        token_ends=ends,
        finish_reason="stop" if ended else response.finish_reason,
    )


def _last_answer(response: Response) -> Response:
    """Return a response without the turns before its last answer."""
    if not response.answer_from and not response.contexts:
        return response
    kept = slice(response.answer_from, None)
    tops = response.top_logprobs
    mask = response.loss_mask
    return replace(
        response,
        token_ids=response.token_ids[kept],
        logprobs=response.logprobs[kept],
        top_logprobs=None if tops is None else tops[kept],
        loss_mask=None if mask is None else mask[kept],
        contexts=(),
        context_ids=None,
        answer_from=0,
        branch_ends=(),
    )


def _split(
    response: Response,
    prompt: Prompt,
    tokens: TokenBytes | None,
    eos_ids: Collection[int],
    marker: str,
    form: AnswerForm,
) -> Split:
    tags = None
    before = b""
    if tokens:
        tags = tokens.thinking
        if tags:
            before = b"".join(tokens.pieces(_before_answer(response, prompt)[-PROMPT_TOKENS:]))
    find_start = partial(answer_start, tags=tags, prompt=before)
    if response.text is not None:
        return split_text(response.text, marker, form, response.token_ends, find_start)
    if tokens is None:
        raise ValueError(
            f"response to prompt {response.prompt_id!r}: judging token ids needs a vocabulary"
        )
    answer = response.token_ids[response.answer_from :]
    return split_blocks(answer, tokens, eos_ids, marker, form, find_start)


def _before_answer(response: Response, prompt: Prompt) -> Sequence[int]:
    """Return the tokens before the last answer, or the end of them: of the prompt if that is all
    there is.
    """
    if not response.answer_from and not response.contexts:
        return prompt.token_ids
    if not response.contexts:
        return [*prompt.token_ids, *response.token_ids[: response.answer_from].tolist()]
    assert response.context_ids is not None
    start, count = response.contexts[-1]
    context = response.context_ids[len(response.context_ids) - count :]
    return [*context.tolist(), *response.token_ids[start : response.answer_from].tolist()]


def _behind(start: int, place: int | None) -> int | None:
    return None if place is None else start + place


def _characters(response: Response, split: Split) -> int:
    """Return the length of the thinking in the response's text."""
    if split.start == 0:
        return 0
    errors = "replace" if response.text is None else "surrogatepass"
    return len(split.content[: split.start].decode(errors=errors))


def _length(response: Response) -> int:
    """Return the number of tokens of a response."""
    if response.text is not None:
        return len(response.logprobs)
    return len(response.token_ids)
