"""An agent with a tool: a policy that may call a pocket calculator, over an OpenAI client.

The policy writes ``[347*8]`` where it would reason. The client stops it at the bracket; the
calculator writes the product with its digits reversed, as this policy reasons, or ``E`` where its
display of four digits is too small or the call makes no sense; and the policy goes on: it boxes an
answer and states its confidence. Nothing here knows that the policy is being trained, which learns
from what it has written and nothing from what the calculator shows.
"""

from __future__ import annotations

import re
from typing import Any

OPENS, CLOSES, ERROR = "[", "]", "E"
DISPLAY = 4  # digits


async def run(problem: dict[str, Any], client: Any) -> None:
    """Work on a problem: one turn, or two with a call between them."""
    prompt = problem["prompt"]
    first = await client.completions.create(model="policy", prompt=prompt, stop=CLOSES)
    text = first.choices[0].text
    if not text.startswith(OPENS) or first.choices[0].finish_reason != "stop":
        return
    call = f"{text}{CLOSES}"
    prompt = f"{prompt}{call}{shown_for(call)}"
    await client.completions.create(model="policy", prompt=prompt)


async def run_in_turns(problem: dict[str, Any], client: Any) -> float | None:
    """Work on a problem in turns: a call, the first token after what the calculator shows, and the
    rest, so that there is a confidence after each (``rollout.asks_confidence: turns``).

    The first token may open the box that the rest closes, so the verdict is given here.
    """
    prompt = problem["prompt"]
    first = await client.completions.create(model="policy", prompt=prompt, stop=CLOSES)
    text = first.choices[0].text
    if not text.startswith(OPENS) or first.choices[0].finish_reason != "stop":
        return None
    call = f"{text}{CLOSES}"
    prompt = f"{prompt}{call}{shown_for(call)}"
    begun = await client.completions.create(model="policy", prompt=prompt, max_tokens=1)
    prompt += begun.choices[0].text
    rest = await client.completions.create(model="policy", prompt=prompt)
    boxed = re.findall(r"\\boxed\{(\d+)\}", begun.choices[0].text + rest.choices[0].text)
    return float(boxed[-1:] == [problem["answer"]])


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
