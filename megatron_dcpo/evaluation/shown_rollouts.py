"""The responses of a run as its page shows them: group by group, each with its blocks, what was
stated, and the advantages by which it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.evaluation.headline import is_number

Row = Mapping[str, Any]  # a judged answer, as a file of samples has it

_GROUPS = 40
_CHARACTERS = 1_500_000  # of the responses on a page; the first group is shown however long it is
SURE = 0.7  # stated confidence from which on a wrong answer is a confident mistake
UNSURE = 0.3  # and up to which a right one is doubted
# what a reader looks for: value of the choice, its text
LOOKED_FOR = (
    ("", "all responses"),
    ("sure-wrong", f"sure and wrong (from {SURE})"),
    ("unsure-right", f"unsure and right (up to {UNSURE})"),
    ("malformed", "no confidence that can be read"),
    ("cut", "cut off, failed or refused"),
)


@dataclass(frozen=True)
class ShownPiece:
    """A part of a response: tokens of one block with one advantage, None where it is not known; or
    a token on which engine and trainer differ, and by how much its log-probs do.
    """

    text: str
    block: str
    advantage: float | None
    apart: float | None = None

    @property
    def title(self) -> str:
        """Return what is said of the part under the pointer."""
        if self.block not in ("reasoning", "confidence"):
            return "not sampled by the policy" if self.block else ""
        said = self.block
        if self.advantage is not None:
            said += f", advantage {self.advantage:+g}"
        if self.apart is not None:
            said += f", log-probs of engine and trainer {self.apart:g} apart"
        return said


@dataclass(frozen=True)
class ShownResponse:
    """A response: its verdict, the facts of its head, what a reader may look for, and its parts."""

    right: bool
    facts: tuple[str, ...]
    tags: str
    pieces: tuple[ShownPiece, ...]


@dataclass(frozen=True)
class ShownGroup:
    """The responses to one problem."""

    problem: str
    truth: str
    facts: str
    responses: tuple[ShownResponse, ...]


@dataclass(frozen=True)
class ShownRollouts:
    """The groups of a run that are shown, of so many that there are; ``step``: of this one, None
    for an evaluation.
    """

    groups: tuple[ShownGroup, ...]
    of: int
    step: int | None


def rollouts_of(rows: Sequence[Row], marker: str) -> ShownRollouts:
    """Return the groups of judged answers, those with the largest error of a stated confidence
    first. ``marker`` divides a response of which the blocks were not kept.
    """
    by_problem: dict[object, list[Row]] = {}
    for row in rows:
        by_problem.setdefault(row.get("prompt_id", id(row)), []).append(row)
    in_order = sorted(by_problem.values(), key=lambda group: -max(map(_error, group)))
    groups: list[ShownGroup] = []
    left = _CHARACTERS
    for group in in_order[:_GROUPS]:
        shown = _group(group, marker)
        left -= sum(len(piece.text) for one in shown.responses for piece in one.pieces)
        if groups and left < 0:
            break
        groups.append(shown)
    steps = [row["training_step"] for row in rows if isinstance(row.get("training_step"), int)]
    return ShownRollouts(groups=tuple(groups), of=len(in_order), step=max(steps, default=None))


def _error(row: Row) -> float:
    """Return |confidence - R|; 0 where no confidence can be read."""
    confidence = row.get("confidence")
    return abs(confidence - float(row.get("correct") or 0)) if is_number(confidence) else 0.0


def _group(rows: Sequence[Row], marker: str) -> ShownGroup:
    first = rows[0]
    rewards = [float(row.get("correct") or 0) for row in rows]
    stated = [row["confidence"] for row in rows if is_number(row.get("confidence"))]
    facts = f"{sum(rewards):g} of {len(rows)} right"
    if stated:
        facts += f", mean stated confidence {sum(stated) / len(stated):.2f}"
    return ShownGroup(
        problem=str(first.get("problem") or ""),
        truth=str(first.get("category") or first.get("ground_truth") or ""),
        facts=facts,
        responses=tuple(_response(row, marker) for row in rows),
    )


def _response(row: Row, marker: str) -> ShownResponse:
    pieces = _pieces(row, marker)
    reward = float(row.get("correct") or 0)
    right = reward > 0.5
    confidence = row.get("confidence")
    facts = [f"R = {reward:g}"]
    facts.append(f"says {confidence:.2f}" if is_number(confidence) else _status(row))
    for block in ("reasoning", "confidence"):
        of_block = {
            piece.advantage
            for piece in pieces
            if piece.block == block and piece.advantage is not None
        }
        if of_block:
            facts.append(f"A {block} " + " ".join(f"{one:+.2f}" for one in sorted(of_block)))
    for turn, at_turn in row.get("turn_confidences") or ():
        facts.append(f"turn {turn}: {at_turn:.2f}" if is_number(at_turn) else f"turn {turn}: none")
    if row.get("finish_reason") not in (None, "stop"):
        facts.append(str(row["finish_reason"]))
    return ShownResponse(right=right, facts=tuple(facts), tags=_tags(row, right), pieces=pieces)


def _status(row: Row) -> str:
    return str(row.get("status") or "no confidence")


def _tags(row: Row, right: bool) -> str:
    """Return the values of :data:`LOOKED_FOR` that a response has, with spaces between them."""
    confidence = row.get("confidence")
    tags = []
    if not is_number(confidence):
        tags.append("malformed")
    elif confidence >= SURE and not right:
        tags.append("sure-wrong")
    elif confidence <= UNSURE and right:
        tags.append("unsure-right")
    if row.get("finish_reason") not in (None, "stop") or row.get("refusal"):
        tags.append("cut")
    return " ".join(tags)


def _pieces(row: Row, marker: str) -> tuple[ShownPiece, ...]:
    """Return the parts of a response as the trainer divided it; the response of an evaluation is
    divided at the last marker.
    """
    kept = row.get("pieces")
    if kept:
        return tuple(
            ShownPiece(
                text=str(text),
                block=str(block),
                advantage=advantage,
                apart=apart[0] if apart else None,
            )
            for text, block, advantage, *apart in kept
        )
    text = str(row.get("text") or "")
    at = text.rfind(marker)
    if at < 0:
        return (ShownPiece(text, "reasoning", None),)
    return (ShownPiece(text[:at], "reasoning", None), ShownPiece(text[at:], "confidence", None))
