"""DCPO without a reward for the confidence: what trains its tokens comes from elsewhere, here from
a teacher (docs/lab/distilled.md).

    dcpo train ... objective.name=examples/lab/confidence_unrewarded.py:METHOD
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_dcpo.objectives import dcpo
from megatron_dcpo.objectives.advantages import Scores
from megatron_dcpo.objectives.options import ObjectiveConfig


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return DCPO's scores with the advantage 0 on all confidence tokens."""
    target, reward, R_c, A_r, A_c = dcpo.score_group(R, c, logprob, options)
    return target, reward, R_c, A_r, np.zeros_like(A_c)


METHOD = replace(dcpo.METHOD, score_group=score_group)
