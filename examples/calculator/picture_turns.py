"""Draw how sure a policy is at each turn with its calculator: after the call, after the first token
that follows the display, and at the end.

    python examples/calculator/picture_turns.py runs/calculator/turns   # leaves turns.png there

Intervals are 95 %, over problems: the sessions of one problem are not independent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from picture import KINDS, LAST, WINDOW, kind_of

from megatron_dcpo.calibration.metrics import percentiles, resampled_rows

PLACES = ("after the call", "after the display", "at the end")
COLORS = {KINDS[1]: "tab:blue", KINDS[2]: "tab:orange"}
RESAMPLES = 1000


@dataclass(frozen=True)
class Session:
    """A logged session with a call: what the display showed, whether the answer is right, and the
    confidence at each place, NaN if malformed.
    """

    step: int
    problem: str
    kind: str
    correct: float
    confidences: tuple[float, ...]


def main() -> None:
    """Draw the sessions whose calls are written as the calculator's."""
    draw(kind_of, PLACES)


def draw(kind_of: Callable[[str], str], places: Sequence[str]) -> None:
    """Draw the run that the command line names. ``kind_of`` says which of :data:`KINDS` a text is;
    ``places`` are the names of the turns of a session with a call, the last of which is its end.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    sessions = read(args.run, kind_of, turns=len(places))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    draw_steps(left, sessions, places)
    draw_turns(right, sessions, places)
    figure.tight_layout()
    figure.savefig(args.run / "turns.png", dpi=120)
    print(args.run / "turns.png")


def read(run: Path, kind_of: Callable[[str], str], turns: int) -> list[Session]:
    """Return the sessions of so many turns, the last of which ended."""
    sessions = []
    earlier = range(1, turns)
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            stated = dict(row.get("turn_confidences", ()))
            if sorted(stated) != list(earlier):
                continue
            values = (*(stated[turn] for turn in earlier), row["confidence"])
            session = Session(
                step=row["training_step"],
                problem=row["prompt_id"],
                kind=kind_of(row["text"]),
                correct=row["correct"],
                confidences=tuple(np.nan if value is None else value for value in values),
            )
            sessions.append(session)
    return sessions


def draw_steps(axes: pyplot.Axes, sessions: Sequence[Session], places: Sequence[str]) -> None:
    """Draw the mean confidence of both kinds of sessions, at the first two places, by the step."""
    for kind, color in COLORS.items():
        windows: dict[int, list[Session]] = {}
        for one in sessions:
            if one.kind == kind:
                windows.setdefault((one.step - 1) // WINDOW, []).append(one)
        steps = [(window + 0.5) * WINDOW for window in windows]
        for place, style in ((0, ":"), (1, "-")):
            means = [np.nanmean(stated_at(place, part)) for part in windows.values()]
            axes.plot(steps, means, style, color=color, label=f"{kind}, {places[place]}")
    axes.set(xlabel="step", ylabel="mean stated confidence", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)


def draw_turns(axes: pyplot.Axes, sessions: Sequence[Session], places: Sequence[str]) -> None:
    """Draw the mean confidence from turn to turn in the last steps, and the accuracy."""
    last = max(one.step for one in sessions)
    late = [one for one in sessions if one.step > last - LAST]
    turns = range(len(places))
    for kind, color in COLORS.items():
        of_kind = [one for one in late if one.kind == kind]
        if not of_kind:
            continue
        label = f"{kind} (n = {len(of_kind)})"
        accuracy = float(np.mean([one.correct for one in of_kind]))
        print(f"{label}: accuracy {accuracy:.3f}")
        means = []
        for place in turns:
            mean, low, high = interval(stated_at(place, of_kind), of_kind)
            print(f"  {places[place]}: {mean:.3f} ({low:.3f} to {high:.3f})")
            axes.vlines(place, low, high, color=color)
            means.append(mean)
        change = stated_at(1, of_kind) - stated_at(0, of_kind)
        mean, low, high = interval(change, of_kind)
        print(f"  {places[1]} less {places[0]}: {mean:+.3f} ({low:+.3f} to {high:+.3f})")
        axes.plot(turns, means, color=color, marker="o", label=label)
        axes.axhline(accuracy, color=color, linestyle="--", linewidth=0.8)
    axes.set_xticks(turns, places)
    axes.set_title(f"steps {last - LAST + 1} to {last}; dashed: accuracy", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def stated_at(place: int, sessions: Sequence[Session]) -> np.ndarray:
    """Return the confidences of sessions at a place [N]."""
    return np.array([one.confidences[place] for one in sessions])


def interval(values: np.ndarray, sessions: Sequence[Session]) -> tuple[float, float, float]:
    """Return the mean of values [N] of sessions, and the ends of its interval; malformed ones are
    left out.
    """
    problems = [one.problem for one in sessions]
    resamples = resampled_rows(problems, len(values), RESAMPLES, seed=1)
    low, high = percentiles(np.array([np.nanmean(values[rows]) for rows in resamples]))
    return float(np.nanmean(values)), low, high


if __name__ == "__main__":
    main()
