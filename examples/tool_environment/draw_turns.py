"""Draw how sure a policy is at each turn with the tool of its environment, as the calculator's
picture: ``python examples/tool_environment/draw_turns.py RUN`` leaves RUN/turns.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "calculator"))

import picture_turns
from draw import kind_of

PLACES = ("after the call", "at the end")

if __name__ == "__main__":
    picture_turns.draw(kind_of, PLACES)
