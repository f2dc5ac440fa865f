"""Draw what a policy has learned about its calculator: how often it calls it, and what it states
after what the calculator shows.

    python examples/calculator/picture.py runs/calculator/dcpo       # leaves calculator.png there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from agent import CLOSES, ERROR, OPENS
from matplotlib import pyplot

WINDOW = 10  # steps in a point of the left panel
LAST = 50  # steps in the right panel
KINDS = ("no call", "product shown", "error shown")


@dataclass(frozen=True)
class Logged:
    """A response that the run has written down, ``confidence`` None if it stated none."""

    step: int
    kind: str
    correct: float
    confidence: float | None


def main() -> None:
    """Draw the responses whose calls are written as the calculator's."""
    draw(kind_of)


def draw(kind_of: Callable[[str], str]) -> None:
    """Draw the run that the command line names; ``kind_of`` says which of :data:`KINDS` a text
    is.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    responses = read(args.run, kind_of)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    draw_calls(left, responses)
    draw_confidences(right, responses)
    figure.tight_layout()
    figure.savefig(args.run / "calculator.png", dpi=120)
    print(args.run / "calculator.png")


def read(run: Path, kind_of: Callable[[str], str]) -> list[Logged]:
    responses = []
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            responses.append(
                Logged(
                    step=row["training_step"],
                    kind=kind_of(row["text"]),
                    correct=row["correct"],
                    confidence=row["confidence"],
                )
            )
    return responses


def kind_of(text: str) -> str:
    """Return which of :data:`KINDS` a response is."""
    _, closes, after = text.partition(CLOSES)
    if not text.startswith(OPENS) or not closes:
        return "no call"
    return "error shown" if after.startswith(ERROR) else "product shown"


def draw_calls(axes: pyplot.Axes, responses: list[Logged]) -> None:
    """Draw the shares of the kinds of responses, and the accuracy, in windows of steps."""
    windows: dict[int, list[Logged]] = {}
    for one in responses:
        windows.setdefault((one.step - 1) // WINDOW, []).append(one)
    steps = [(window + 0.5) * WINDOW for window in windows]
    for kind in KINDS[1:]:
        shares = [np.mean([r.kind == kind for r in part]) for part in windows.values()]
        axes.plot(steps, shares, label=kind)
    accuracy = [np.mean([r.correct for r in part]) for part in windows.values()]
    axes.plot(steps, accuracy, color="black", linestyle=":", label="accuracy")
    axes.set(xlabel="step", ylabel="share of the responses", ylim=(0, 1))
    axes.legend(frameon=False)


def draw_confidences(axes: pyplot.Axes, responses: list[Logged]) -> None:
    """Draw accuracy and mean stated confidence of each kind of response in the last steps."""
    last = max(one.step for one in responses)
    late = [one for one in responses if one.step > last - LAST]
    places = np.arange(len(KINDS))
    labels = []
    for place, kind in enumerate(KINDS):
        of_kind = [r for r in late if r.kind == kind and r.confidence is not None]
        labels.append(f"{kind}\n(n = {len(of_kind)})")
        if not of_kind:
            continue
        accuracy = np.mean([r.correct for r in of_kind])
        confidence = np.mean([r.confidence for r in of_kind])
        print(f"{kind}: n {len(of_kind)}, accuracy {accuracy:.3f}, confidence {confidence:.3f}")
        axes.bar(place - 0.2, accuracy, 0.4, color="0.6")
        axes.bar(place + 0.2, confidence, 0.4, color="tab:blue")
    axes.bar(0, 0, color="0.6", label="accuracy")
    axes.bar(0, 0, color="tab:blue", label="mean confidence")
    axes.set_xticks(places, labels)
    axes.set(ylim=(0, 1.3), title=f"steps {last - LAST + 1} to {last}")
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.legend(frameon=False, ncols=2, loc="upper center")


if __name__ == "__main__":
    main()
