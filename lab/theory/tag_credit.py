"""The block of the confidence tag: a tabular policy that may reason or write the tag ("marker") at once.

Reasoning is right with probability p; writing the tag at once ("giving up") is wrong, and a confidence of 0 is then
perfect. Trained on A_c, the tag is reinforced wherever the responses that reason are not calibrated perfectly, and they
cannot be where their answers may be right or wrong; A_r is on no token of a response that gives up. Trained on A_r
(``marker_block: reasoning``), giving up is trained as the wrong answer that it is.
"""

from __future__ import annotations

import numpy as np

from lab.theory.gradient_conflict import sampled_gradient, softmax
from megatron_dcpo.objectives import ObjectiveConfig, build_objective
from megatron_dcpo.types import Judgement

LEVELS = np.linspace(0, 1, 11)


def response(prompt: int, gives_up: bool, correct: bool, confidence: float) -> Judgement:
    """``[reasoning] [marker] [confidence]``, or without the first."""
    boundary = 0 if gives_up else 1
    return Judgement(
        f"p{prompt}", float(correct), confidence, "ok", boundary, length=boundary + 2, marker_end=boundary + 1
    )


def share_that_gives_up(
    config: ObjectiveConfig,
    *,
    p: float,
    start: float,
    steps: int,
    prompts: int,
    group_size: int,
    lr: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Probability of giving up along training, [steps + 1], from ``start`` on, under the trainer's own advantages."""
    objective, n = build_objective(config), prompts * group_size
    decision = np.log([1 - start, start])
    confidences = np.zeros((2, len(LEVELS)))
    confidences[1, 0] = 5.0  # that no answer is wrong is soon learnt
    path = [start]
    for _ in range(steps):
        gives_up = rng.random(n) < path[-1]
        correct = (rng.random(n) < p) & ~gives_up
        pi = [softmax(row) for row in confidences]
        levels = np.array([rng.choice(len(LEVELS), p=pi[int(branch)]) for branch in gives_up])
        groups = np.arange(n) // group_size
        rows = zip(groups.tolist(), gives_up.tolist(), correct.tolist(), LEVELS[levels].tolist(), strict=True)
        scored = objective.score([response(*row) for row in rows])
        first, last = np.array([[tokens.advantages[0], tokens.advantages[-1]] for tokens in scored.tokens]).T
        decision += lr * sampled_gradient(softmax(decision), gives_up.astype(int), first)
        for branch in (0, 1):
            confidences[branch] += lr * sampled_gradient(pi[branch], levels, last * (gives_up == branch))
        path.append(float(softmax(decision)[1]))
    return np.array(path)
