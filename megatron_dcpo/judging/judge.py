"""A response becomes a judgement: where its blocks meet, whether its answer is right, how sure it says it is."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron_dcpo.judging.blocks import split_blocks
from megatron_dcpo.judging.confidence import MARKER, parse_confidence
from megatron_dcpo.judging.math import verify_math
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Judgement, Prompt, Response

Verifier = Callable[[str, str], bool]


def judge(
    response: Response,
    prompt: Prompt,
    tokens: TokenBytes,
    eos_ids: Collection[int],
    *,
    marker: str = MARKER,
    verifier: Verifier = verify_math,
) -> Judgement:
    """Judge one response of ``prompt``.

    The answer is read in the reasoning block only, so that no confidence token can change R. A response that closes
    with an EOS is finished whatever the engine reports. Raises ValueError when the response is another prompt's.
    """
    if response.prompt_id != prompt.prompt_id:
        raise ValueError(f"response to prompt {response.prompt_id!r} judged against prompt {prompt.prompt_id!r}")
    split = split_blocks(response.token_ids, tokens, eos_ids, marker)
    finished = split.ended or response.finish_reason == "stop"
    parsed = parse_confidence(split.content.decode(errors="replace"), marker=marker, finished=finished)
    return Judgement(
        prompt_id=prompt.prompt_id,
        correct=float(verifier(split.reasoning.decode(errors="replace"), prompt.ground_truth)),
        confidence=parsed.confidence,
        status=parsed.status,
        boundary=split.boundary,
        length=len(response.token_ids),
        stated=parsed.stated,
    )
