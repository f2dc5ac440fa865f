"""A rollout with a tool: a policy that may call a pocket calculator, and one response of two turns.

The policy writes ``[347*8]`` where it would reason. Its turn ends with the bracket; the calculator
writes the product with its digits reversed, as this policy reasons, or ``E`` where its display of
four digits is too small or the call makes no sense; and the policy goes on: it boxes an answer and
states its confidence. A response without a call is one turn. The calculator's tokens are trained on
by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_dcpo.rollout import RolloutContext, Samples, Transcript
from megatron_dcpo.types import Response

OPENS, CLOSES, ERROR = "[", "]", "E"
DISPLAY = 4  # digits
CALL_TOKENS = 12  # more than any call has


def rollout(samples: Samples, context: RolloutContext) -> Iterator[list[Response]]:
    """Yield a response to every (prompt, index) of ``samples``."""
    prompts = {prompt.prompt_id: prompt for prompt, _ in samples}
    called = {}
    most = context.sampling.max_tokens - CALL_TOKENS - DISPLAY
    for together in context.sample(samples, max_tokens=most):
        finished = []
        for turn in together:
            tokens = tokens_of_call(turn, context)
            transcript = Transcript(prompts[turn.prompt_id], turn.sample_index)
            if not tokens:
                finished.append(transcript.sampled(turn).response())
                continue
            shown = shown_for(context.decode(turn.token_ids[:tokens]))
            transcript = transcript.sampled(turn, tokens).written(context.encode(shown))
            next_prompt = transcript.next_prompt()
            called[next_prompt.prompt_id, turn.sample_index] = transcript
        if finished:
            yield finished

    asked = [(one.next_prompt(), one.sample_index) for one in called.values()]
    for together in context.sample(asked, max_tokens=most):
        yield [called[turn.key].sampled(turn).response() for turn in together]


def tokens_of_call(turn: Response, context: RolloutContext) -> int:
    """Return how many tokens the call has that a response begins with; 0 if it begins with none."""
    text = ""
    for count, token in enumerate(turn.token_ids[:CALL_TOKENS], start=1):
        text += context.decode([token])
        if not text.startswith(OPENS):
            return 0
        if text.endswith(CLOSES):
            return count
    return 0


def call_for(problem: str) -> str:
    """Return the call that asks the calculator for a problem, ``347*8=``."""
    return f"{OPENS}{problem.rstrip('=')}{CLOSES}"


def shown_for(call: str) -> str:
    """Return what the calculator shows: the digits of the product from the last to the first."""
    factors = re.fullmatch(r"\[(\d{1,3})\*(\d{1,3})\]", call)
    if factors is None:
        return ERROR
    product = str(int(factors[1]) * int(factors[2]))
    return product[::-1] if len(product) <= DISPLAY else ERROR


def was_shown(shown: str) -> bool:
    """Return whether the calculator has shown a product."""
    return shown != ERROR
