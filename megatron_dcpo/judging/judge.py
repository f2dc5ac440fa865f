"""A response becomes a judgement: where its blocks meet, whether its answer is right, how sure it says it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from megatron_dcpo.judging.answers import BOXED, AnswerForm
from megatron_dcpo.judging.blocks import split_blocks
from megatron_dcpo.judging.confidence import MARKER, parse_confidence
from megatron_dcpo.judging.math.verifier import verify_many
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Judgement, Prompt, Response

Verifier = Callable[[Sequence[tuple[str, str]]], list[bool]]  # (response text, ground truth) -> right or wrong


def judge_many(
    responses: Sequence[Response],
    prompts: Mapping[str, Prompt],
    tokens: TokenBytes,
    eos_ids: Collection[int],
    *,
    marker: str = MARKER,
    verifier: Verifier = verify_many,
    form: AnswerForm = BOXED,
) -> list[Judgement]:
    """Judge responses, each to its prompt in ``prompts`` (by id), side by side where answers need algebra.

    The answer is read in the reasoning block only, so that no confidence token can change R. A response that closes
    with an EOS is finished whatever the engine reports.
    """
    splits = [split_blocks(response.token_ids, tokens, eos_ids, marker, form) for response in responses]
    reasonings = [split.reasoning.decode(errors="replace") for split in splits]
    truths = [prompts[response.prompt_id].ground_truth for response in responses]
    verdicts = verifier(list(zip(reasonings, truths, strict=True)))
    judgements = []
    for response, split, correct in zip(responses, splits, verdicts, strict=True):
        finished = split.ended or response.finish_reason == "stop"
        text = split.content.decode(errors="replace")
        parsed = parse_confidence(text, marker=marker, finished=finished, opener=form.opener)
        judgements.append(
            Judgement(
                prompt_id=response.prompt_id,
                correct=float(correct),
                confidence=parsed.confidence,
                status=parsed.status,
                boundary=split.boundary,
                length=len(response.token_ids),
                stated=parsed.stated,
                answered=form.opener.encode() in split.reasoning,
                marker_end=split.marker_end,
            )
        )
    return judgements


def judge(
    response: Response,
    prompt: Prompt,
    tokens: TokenBytes,
    eos_ids: Collection[int],
    *,
    marker: str = MARKER,
    verifier: Verifier = verify_many,
    form: AnswerForm = BOXED,
) -> Judgement:
    """Judge one response of ``prompt``. Raises ValueError when the response is another prompt's."""
    if response.prompt_id != prompt.prompt_id:
        raise ValueError(f"response to prompt {response.prompt_id!r} judged against prompt {prompt.prompt_id!r}")
    found = {prompt.prompt_id: prompt}
    return judge_many([response], found, tokens, eos_ids, marker=marker, verifier=verifier, form=form)[0]
