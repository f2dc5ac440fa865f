"""The verifier of transcripts, whose answers were judged before: ``judging.verifier``."""

from __future__ import annotations


def verify(response: str, answer: str) -> float:
    """Return the verdict, which is the row's answer: 1 or 0."""
    return float(answer)
