"""An agent of two turns: the policy answers, a tool checks the last digit, the policy answers once
more.

The first turn ends where the policy would state its confidence. The tool multiplies the last digits
of the problem and writes what it found behind the first answer; then the policy answers once more
and states its confidence. Everything is one response: the judge reads its last box, and the tokens
of the tool are trained on by nobody.
"""

from __future__ import annotations

import re
from typing import Any

MARKER = "<conf>"
TURN = 30  # tokens of a turn, at most; the tool writes up to 4


async def run(problem: dict[str, Any], client: Any) -> None:
    """Work on a problem in two turns."""
    prompt = problem["prompt"]
    first = await client.completions.create(
        model="policy", prompt=prompt, stop=MARKER, max_tokens=TURN
    )
    answer = first.choices[0].text
    seen = f"{prompt}{answer}{hint_for(problem['problem'], answer)}"
    await client.completions.create(model="policy", prompt=seen, max_tokens=TURN)


def hint_for(problem: str, answer: str) -> str:
    """Return what the tool says of an answer: whether its last digit can be right."""
    left, right = re.findall(r"\d+", problem)[:2]
    digit = int(left[-1]) * int(right[-1]) % 10
    boxed = re.findall(r"\\boxed\{(\d+)\}", answer)
    is_possible = bool(boxed) and int(boxed[-1]) % 10 == digit
    return "\n" if is_possible else f"!{digit}\n"
