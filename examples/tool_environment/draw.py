"""Draw what a policy has learned about the tool of its environment, as the calculator's picture:
``python examples/tool_environment/draw.py RUN`` leaves RUN/calculator.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "calculator"))

import picture

ENDS_CALL = "</tool_call><|endoftext|>"  # as the policy writes a call, and ends its turn


def kind_of(text: str) -> str:
    """Return whether a response has asked for a product, and what was shown."""
    _, ends, after = text.partition(ENDS_CALL)
    if not ends:
        return "no call"
    return "product shown" if after[:1].isdigit() else "error shown"


if __name__ == "__main__":
    picture.draw(kind_of)
