"""A rollout of two turns: the policy answers, a tool checks the last digit, the policy answers
again.

The first turn ends where the policy would state its confidence. The tool multiplies the last digits
of the problem and writes what it found behind the first answer; then the policy answers once more
and states its confidence. Everything is one response: the judge reads its last box, and the tokens
of the tool are trained on by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_dcpo.rollout.function import RolloutContext, Transcript
from megatron_dcpo.rollout.sampling import Samples
from megatron_dcpo.types import Prompt, Response

MARKER = "<conf>"
HINT_TOKENS = 4  # that the tool writes, at most


def rollout(samples: Samples, context: RolloutContext) -> Iterator[list[Response]]:
    """Yield a response to every (prompt, index) of ``samples``."""
    first_turns = {
        (prompt.prompt_id, index): Transcript(prompt, index) for prompt, index in samples
    }
    second_turns = {}
    # The same length for both turns, whatever the others of this rank have written: a response
    # depends on its prompt, its index and the weights alone.
    length = (context.sampling.max_tokens - HINT_TOKENS) // 2
    for together in context.sample(samples, max_tokens=length):
        for turn in together:
            transcript = first_turns[turn.key]
            tokens = tokens_before(MARKER, turn, context)
            hint = hint_for(transcript.prompt, context.decode(turn.token_ids[:tokens]))
            transcript = transcript.sampled(turn, tokens).written(context.encode(hint))
            prompt = transcript.next_prompt()
            second_turns[prompt.prompt_id, turn.sample_index] = transcript

    asked = [(one.next_prompt(), one.sample_index) for one in second_turns.values()]
    for together in context.sample(asked, max_tokens=length):
        yield [second_turns[turn.key].sampled(turn).response() for turn in together]


def tokens_before(marker: str, response: Response, context: RolloutContext) -> int:
    """Return how many tokens of a response come before the marker, without its end token."""
    for count in range(1, len(response.token_ids) + 1):
        if marker in context.decode(response.token_ids[:count]):
            return count - len(context.encode(marker))
    ends = int(response.token_ids[-1]) in context.engine.eos_token_ids
    return len(response.token_ids) - ends


def hint_for(prompt: Prompt, answer: str) -> str:
    """Return what the tool says of an answer: whether its last digit can be right."""
    left, right = re.findall(r"\d+", prompt.messages[-1]["content"])[:2]
    digit = int(left[-1]) * int(right[-1]) % 10
    boxed = re.findall(r"\\boxed\{(\d+)\}", answer)
    is_possible = bool(boxed) and int(boxed[-1]) % 10 == digit
    return "\n" if is_possible else f"!{digit}\n"
