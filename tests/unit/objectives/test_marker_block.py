"""Whose token the marker is: ``objective.marker_block``."""

from __future__ import annotations

import numpy as np

from megatron_dcpo.types import BLOCK_CONFIDENCE, Judgement
from tests.helpers.objective_cases import objective, score


def giving_up(marker_block: str) -> tuple[np.ndarray, np.ndarray]:
    """Advantages of the marker: two responses reason, are right with 1/2 and say so; two write it
    at once, and 0.
    """
    reasoned = [
        Judgement("p", R, 0.5, "ok", boundary=3, length=6, marker_end=4) for R in (1.0, 0.0)
    ]
    at_once = [Judgement("p", 0.0, 0.0, "ok", boundary=0, length=3, marker_end=1)] * 2
    chosen = objective(preset="dcpo_proper", marker_block=marker_block)
    tokens = score(chosen, [*reasoned, *at_once]).samples
    return np.array([t.advantages[3] for t in tokens[:2]]), np.array(
        [t.advantages[0] for t in tokens[2:]]
    )


def test_the_marker_answers_for_correctness_or_giving_up_is_rewarded() -> None:
    """Wrong with a confidence of 0 is perfect calibration: as a confidence token, an early marker
    is reinforced.
    """
    reasoned, at_once = giving_up("confidence")
    assert (at_once > 0).all()
    reasoned, at_once = giving_up("reasoning")
    assert (at_once < 0).all()
    assert reasoned.mean() > 0


def test_marker_block_moves_the_marker_and_nothing_else() -> None:
    rows = [
        Judgement("p", 1.0, 0.5, "ok", boundary=3, length=8, marker_end=5),
        Judgement(
            "p", 0.0, None, "missing", boundary=4, length=5, marker_end=4
        ),  # its EOS keeps the penalty
        Judgement("p", 0.0, None, "unparsable", boundary=2, length=6, marker_end=3),
        Judgement("p", 0.0, 0.5, "ok", boundary=3, length=8),  # not known where the marker ends
    ]
    starts = {
        where: [
            int(np.argmax(t.block_ids == BLOCK_CONFIDENCE))
            for t in score(objective(marker_block=where), rows).samples
        ]
        for where in ("confidence", "reasoning")
    }
    assert starts == {"confidence": [3, 4, 2, 3], "reasoning": [5, 4, 3, 3]}
    assert objective(preset="dcpo_proper").options.marker_block == "reasoning"
    assert objective().options.marker_block == "confidence"
