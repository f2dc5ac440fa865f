"""A response becomes a judgement: where its blocks meet, whether its answer is right, which
confidence it states.

One judge for training (sampled token ids) and for evaluation (text: a server's, or a file's of an
earlier evaluation).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from megatron_dcpo.judging.answers import BOXED, AnswerForm, Attempt, Outcome
from megatron_dcpo.judging.blocks import Split, ends_of_tokens, split_blocks, split_text
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.judging.questions import is_abstention
from megatron_dcpo.judging.thinking import PROMPT_TOKENS, answer_start
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import CONFIDENCE_TAG, Judgement, Prompt, Response

# Threads that wait for the judge's processes: a slow response keeps the processes from no other.
# They live as long as this process: sandboxes that die with their parent die with the thread that
# began them.
JUDGES = ThreadPoolExecutor(max_workers=32, thread_name_prefix="judge")

Verifier = Callable[[Sequence[Attempt]], Sequence[Outcome]]  # the outcomes in order
Judge = Callable[
    [Sequence[Response], Mapping[str, Prompt]], Sequence[Judgement]
]  # the prompts by their id


def judge_many(
    responses: Sequence[Response],
    prompts: Mapping[str, Prompt],
    tokens: TokenBytes | None = None,
    eos_ids: Collection[int] = (),
    *,
    marker: str = CONFIDENCE_TAG,
    verifier: Verifier = verify_answers,
    form: AnswerForm = BOXED,
) -> list[Judgement]:
    """Judge responses, each to its prompt in ``prompts`` (by id), side by side where answers need
    algebra.

    A response with ``text`` is judged by its text, every other one by its token ids, which needs
    ``tokens`` and ``eos_ids``. The answer is read in the reasoning block only, so that no
    confidence token can change R, and behind the thinking, where the tokenizer of ``tokens`` has a
    token that ends it. A response that closes with an EOS is finished whatever the engine reports.
    """
    splits = [
        _split(r, prompts[r.prompt_id], tokens, eos_ids, marker, form)
        for r in responses
    ]
    attempts = []
    for response, split in zip(responses, splits, strict=True):
        prompt, reasoning = (
            prompts[response.prompt_id],
            split.reasoning.decode(errors="replace"),
        )
        attempts.append(
            Attempt(form.extract(reasoning), prompt.ground_truth, reasoning, prompt.row)
        )
    judgements = []
    for response, split, attempt, outcome in zip(
        responses, splits, attempts, verifier(attempts), strict=True
    ):
        finished = split.ended or response.finish_reason == "stop"
        text = split.answer.decode(errors="replace")
        parsed = parse_confidence(
            text, marker=marker, finished=finished, opener=form.opener
        )
        judgements.append(
            Judgement(
                prompt_id=response.prompt_id,
                correct=float(outcome.correct),
                confidence=parsed.confidence,
                status=parsed.status,
                boundary=split.boundary,
                length=len(
                    response.logprobs
                    if response.text is not None
                    else response.token_ids
                ),
                stated=parsed.stated,
                answered=split.start is not None
                and form.opener.encode() in split.reasoning,
                marker_end=split.marker_end,
                answer=attempt.answer,
                category=outcome.category,
                score=outcome.score,
                logged=outcome.logged,
                abstained=not outcome.correct and is_abstention(attempt.answer),
                thinking_tokens=split.thinking,
                thinking_characters=_characters(response, split),
            )
        )
    return judgements


def judge_by_task(
    responses: Sequence[Response],
    prompts: Mapping[str, Prompt],
    judges: Mapping[str, Callable[..., Sequence[Judgement]]],
    **options: object,
) -> list[Judgement]:
    """Return the judgements of responses to problems of several sources, in order. Each response is
    judged by the judge of its task, which gets the ``options`` as well.
    """
    of_task: dict[str, list[int]] = {}
    for index, response in enumerate(responses):
        of_task.setdefault(prompts[response.prompt_id].task, []).append(index)
    judged: dict[int, Judgement] = {}
    for task, indices in of_task.items():
        asked = [responses[index] for index in indices]
        judged.update(
            zip(indices, judges[task](asked, prompts, **options), strict=True)
        )
    return [judged[index] for index in range(len(responses))]


def with_text(
    response: Response, tokens: TokenBytes, eos_ids: Collection[int]
) -> Response:
    """Return the same response with its ``text``: byte by byte, without its end token; other
    special tokens stay.

    ``finish_reason`` becomes ``stop`` where an EOS closes the response, so that the text is judged
    as the ids are.
    """
    ids = response.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in eos_ids
    pieces = tokens.pieces(ids[: len(ids) - ended])
    text = b"".join(pieces).decode(errors="replace")
    ends = ends_of_tokens([*map(len, pieces), *[1] * ended], text)
    return replace(
        response,
        text=text,
        token_ends=ends,
        finish_reason="stop" if ended else response.finish_reason,
    )


def _split(
    response: Response,
    prompt: Prompt,
    tokens: TokenBytes | None,
    eos_ids: Collection[int],
    marker: str,
    form: AnswerForm,
) -> Split:
    tags = tokens.thinking if tokens else None
    before = (
        b"".join(tokens.pieces(prompt.token_ids[-PROMPT_TOKENS:]))
        if tokens and tags
        else b""
    )
    find_start = partial(answer_start, tags=tags, prompt=before)
    if response.text is not None:
        return split_text(response.text, marker, form, response.token_ends, find_start)
    if tokens is None:
        raise ValueError(
            f"response to prompt {response.prompt_id!r}: token ids are judged with a vocabulary "
            "only"
        )
    return split_blocks(response.token_ids, tokens, eos_ids, marker, form, find_start)


def _characters(response: Response, split: Split) -> int:
    """Return the length of the thinking in the response's text."""
    if split.start == 0:
        return 0
    return len(
        split.content[: split.start].decode(
            errors="replace" if response.text is None else "surrogatepass"
        )
    )
