"""The ternary reward of TruthRL together with DCPO's confidence (arXiv 2509.25760;
docs/algorithms.md#2-methods).

Saying that one does not know earns more than a wrong answer and less than a right one.
"""

from __future__ import annotations

import numpy as np

from megatron_dcpo.objectives import dcpo
from megatron_dcpo.objectives.advantages import Scores, correctness_reward, normalize
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import ObjectiveConfig


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return DCPO's scores with the reward r_i = 1 for a right answer, 0 for an abstention (R_i is
    NaN), -``abstain_penalty`` for a wrong one.

    Target, R_c and A_c are computed from the answered responses alone, if there are two or more. An
    abstention, or a single answered response, has neither target nor R_c, and A_c = 0.
    """
    answered = ~np.isnan(R)
    R_a = R[answered]
    c_a = c[answered]
    reward = np.zeros_like(R)
    target = np.full_like(R, np.nan)
    R_c = np.full_like(R, np.nan)
    A_c = np.zeros_like(R)
    reward[answered] = correctness_reward(
        R_a - options.options["abstain_penalty"] * (1 - R_a), c_a, options
    )
    if len(R_a) > 1:
        dcpo_scores = dcpo.score_group(R_a, c_a, logprob[answered], options)
        target[answered], _, R_c[answered], _, A_c[answered] = dcpo_scores
    A_r = normalize(reward, options.advantage_normalization_reasoning, options)
    return target, reward, R_c, A_r, A_c


METHOD = Method(
    score_group=score_group,
    reads=dcpo.METHOD.reads,
    own_options={**dcpo.METHOD.own_options, "abstain_penalty": 1.0},
    meanings={
        **dcpo.METHOD.meanings,
        "abstain_penalty": "What a wrong answer loses against an abstention.",
    },
    defaults=dcpo.defaults,
    abstention=True,
)
