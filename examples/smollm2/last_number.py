"""A verifier for a model that boxes nothing: the last number of the response is its answer."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*")


def verify(response: str, answer: str, **columns: object) -> bool:
    """Return whether the last whole number of ``response`` is ``answer``."""
    numbers = _NUMBER.findall(response)
    return bool(numbers) and int(numbers[-1].replace(",", "")) == int(answer)
