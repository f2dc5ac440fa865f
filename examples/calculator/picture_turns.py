"""Draw how sure a policy is at each turn with its calculator: behind the call, behind the first
token after what the calculator shows, and at the end.

    python examples/calculator/picture_turns.py runs/calculator/turns   # leaves turns.png there
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from picture import KINDS, LAST, WINDOW, kind_of

PLACES = ("behind the call", "behind the display", "at the end")
COLORS = {KINDS[1]: "tab:blue", KINDS[2]: "tab:orange"}


@dataclass(frozen=True)
class Session:
    """A logged session with a call: what the display showed, whether the answer is right, and the
    confidence at each of :data:`PLACES`, NaN if malformed.
    """

    step: int
    kind: str
    correct: float
    confidences: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    sessions = read(args.run)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    draw_steps(left, sessions)
    draw_turns(right, sessions)
    figure.tight_layout()
    figure.savefig(args.run / "turns.png", dpi=120)
    print(args.run / "turns.png")


def read(run: Path) -> list[Session]:
    """Return the sessions with a call, whose display was followed by an answer."""
    sessions = []
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            stated = dict(row.get("turn_confidences", ()))
            if set(stated) != {1, 2}:
                continue
            values = (stated[1], stated[2], row["confidence"])
            sessions.append(
                Session(
                    step=row["training_step"],
                    kind=kind_of(row["text"]),
                    correct=row["correct"],
                    confidences=tuple(np.nan if value is None else value for value in values),
                )
            )
    return sessions


def draw_steps(axes: pyplot.Axes, sessions: list[Session]) -> None:
    """Draw the mean confidence of both kinds of sessions, behind call and display, over the
    steps.
    """
    for kind, color in COLORS.items():
        for place, style in ((0, ":"), (1, "-")):
            windows: dict[int, list[float]] = {}
            for one in sessions:
                if one.kind == kind:
                    windows.setdefault((one.step - 1) // WINDOW, []).append(one.confidences[place])
            steps = [(window + 0.5) * WINDOW for window in windows]
            means = [np.nanmean(part) for part in windows.values()]
            axes.plot(steps, means, style, color=color, label=f"{kind}, {PLACES[place]}")
    axes.set(xlabel="step", ylabel="mean stated confidence", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)


def draw_turns(axes: pyplot.Axes, sessions: list[Session]) -> None:
    """Draw the mean confidence from turn to turn in the last steps, and the accuracy."""
    last = max(one.step for one in sessions)
    late = [one for one in sessions if one.step > last - LAST]
    for kind, color in COLORS.items():
        of_kind = [one for one in late if one.kind == kind]
        if not of_kind:
            continue
        confidences = np.array([one.confidences for one in of_kind])
        means = np.nanmean(confidences, axis=0)
        accuracy = float(np.mean([one.correct for one in of_kind]))
        label = f"{kind} (n = {len(of_kind)})"
        axes.plot(range(len(PLACES)), means, color=color, marker="o", label=label)
        axes.axhline(accuracy, color=color, linestyle="--", linewidth=0.8)
        stated = ", ".join(f"{mean:.3f}" for mean in means)
        malformed = float(np.isnan(confidences).mean())
        print(f"{label}: accuracy {accuracy:.3f}, confidence {stated}, malformed {malformed:.3f}")
    axes.set_xticks(range(len(PLACES)), PLACES)
    axes.set_title(f"steps {last - LAST + 1} to {last}; dashed: accuracy", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
