"""Losses that users of other trainers expect, each against its paper's formula written out on the
golden group.

The formulas are loops over plain numbers; ``OTHER_LOSSES`` has what they give, written down.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.objectives.shaping import adapted_entropy_coef
from megatron_dcpo.types import BLOCKS
from tests.helpers.objective_cases import (
    INPUTS,
    NEW,
    OLD,
    OTHER_LOSSES,
    golden_judgements,
    judgement,
    loss_and_gradient,
    objective,
    samples_of,
    score,
)

LOW, HIGH = 0.2, 0.28


def gspo(A, new, old) -> float:
    """Zheng et al. 2025, equations 5 to 7 with the advantages of tokens (14): s_i = exp(mean of log
    pi / pi_old).
    """
    total = 0.0
    for a, n, o in zip(A, new, old, strict=True):
        s = math.exp(sum(n - o) / len(n))
        total += sum(min(s * x, min(max(s, 1 - LOW), 1 + HIGH) * x) for x in a) / len(n)
    return -total / len(new)


def cispo(A, new, old) -> float:
    """MiniMax-M1 2025, equations 4 and 5, with GRPO's mean over sequences in the place of that over
    tokens.
    """
    total = 0.0
    for a, n, o in zip(A, new, old, strict=True):
        held = [min(max(math.exp(x - y), 1 - LOW), 1 + HIGH) for x, y in zip(n, o, strict=True)]
        total += sum(h * x * lp for h, x, lp in zip(held, a, n, strict=True)) / len(n)
    return -total / len(new)


def dr_grpo(A, new, old) -> float:
    """Liu et al. 2025: neither the length nor the std divides; a constant of 16 tokens does."""
    total = 0.0
    for a, n, o in zip(A, new, old, strict=True):
        for x, y, z in zip(a, n, o, strict=True):
            rho = math.exp(y - z)
            total += min(rho * x, min(max(rho, 1 - LOW), 1 + HIGH) * x)
    return -total / (16 * len(new))


FORMULAS = {"gspo": gspo, "cispo": cispo, "dr_grpo": dr_grpo}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_losses_are_their_papers_formulas(name: str) -> None:
    options, expected = OTHER_LOSSES[name]
    chosen = objective(**options)
    samples = chosen.score(samples_of(golden_judgements()))
    total, _ = loss_and_gradient(chosen)
    assert total == pytest.approx(
        FORMULAS[name.split()[1]]([s.advantages for s in samples], NEW, OLD), abs=1e-12
    )
    assert total == pytest.approx(expected, abs=1e-12)


def test_gradients_of_gspo_and_cispo() -> None:
    """GSPO-token: s_i A_t / (N |o_i|) inside the clip, 0 where it binds, for all tokens of a
    response alike. CISPO: the held ratio times A_t / (N |o_i|), also where the clip binds.
    """
    for name, options in (("gspo", {"ratio": "sequence"}), ("cispo", {"clip": "cispo"})):
        chosen = objective(name="dcpo", **options)
        samples = chosen.score(samples_of(golden_judgements()))
        _, gradient = loss_and_gradient(chosen)
        binding = 0
        for sample, g, n, o in zip(samples, gradient, NEW, OLD, strict=True):
            A = np.asarray(sample.advantages)
            rho = np.full(len(n), np.exp(np.mean(n - o))) if name == "gspo" else np.exp(n - o)
            held = np.clip(rho, 1 - LOW, 1 + HIGH)
            binds = held * A < rho * A
            binding += int(binds.sum())
            weight = np.where(binds, 0.0, rho) if name == "gspo" else held
            assert g == pytest.approx(-weight * A / (len(NEW) * len(n)), abs=1e-12)
        assert binding or name == "gspo"


def test_the_blocks_stay_apart_under_a_ratio_of_the_sequence() -> None:
    """Without a weight on the confidence its tokens have no gradient, though their log-probs are in
    the ratio.
    """
    chosen = objective(name="dcpo", ratio="sequence", weight_confidence=0.0)
    samples = chosen.score(samples_of(golden_judgements()))
    _, gradient = loss_and_gradient(chosen)
    for sample, g in zip(samples, gradient, strict=True):
        confidence = np.asarray(sample.block_ids) == BLOCKS["confidence"]
        assert not g[confidence].any()
        assert g[~confidence].any() or not sample.advantages[~confidence].any()


def test_the_engines_log_probs_as_old_ones() -> None:
    """By hand: A = 1/2 and -1/2, weights 1/4. Ratios e^.1 and e^1, held at 1.28, of the right
    response; e^-1, held at .8, and 1 of the wrong one. What stands in old_logprobs is not read.
    """
    chosen = objective(name="grpo", old_logprobs="engine", advantage_normalization="mean")
    judgements = [judgement("p", R, 0.9, boundary=1, length=2) for R in (1.0, 0.0)]
    new, other = ([np.array([-1.0, -0.5]), np.array([-2.0, -1.0])], [np.full(2, -9.0)] * 2)
    engine = torch.tensor([-1.1, -1.5, -1.0, -1.0], dtype=torch.float64)
    total, gradient = loss_and_gradient(chosen, judgements, other, new, engine_logprobs=engine)
    assert total == pytest.approx((-1.1051709180756477 / 2 - 0.64 + 0.4 + 0.5) / 4, abs=1e-12)
    assert np.concatenate(gradient) == pytest.approx(
        [-1.1051709180756477 / 8, 0.0, 0.0, 0.125], abs=1e-12
    )
    assert chosen.loss_is_separable
    with pytest.raises(
        ValueError, match=r"objective.old_logprobs needs engine_logprobs for every response"
    ):
        loss_and_gradient(chosen, judgements, other, new)


def test_a_ratio_of_the_sequence_is_not_taken_in_parts() -> None:
    assert objective(name="grpo").loss_is_separable
    assert objective(name="grpo", clip="cispo").loss_is_separable
    assert not objective(name="grpo", ratio="sequence").loss_is_separable


def test_constant_does_not_look_at_the_length() -> None:
    """Two tokens of responses with 4 and 40 tokens weigh the same."""
    chosen = objective(name="grpo", loss_aggregation="constant", max_response_length=50)
    of_group = [judgement("p", 1.0, 0.5, 2, 4), judgement("p", 0.0, 0.5, 30, 40)]
    short, long = chosen.score(samples_of(of_group))
    assert set(np.concatenate([short.weights, long.weights])) == {1 / (2 * 50)}


def test_the_length_penalty_is_dapos() -> None:
    """Equation 13 at 16, 20 and 12 + 8 = 20 tokens of at most 20 with a buffer of 8: 0, -.5, -1."""
    lengths = (12, 16, 20, 5)
    group = [
        judgement("p", R, 0.5, n - 2, n) for R, n in zip((1.0, 1.0, 1.0, 0.0), lengths, strict=True)
    ]
    options = {"overlong_buffer": 8, "max_response_length": 20}
    expected = np.array([1.0, 0.5, 0.0, 0.0])
    A = (expected - expected.mean()) / (expected.std() + 1e-6)
    grpo = score(objective(name="grpo", **options), group)
    assert pytest.approx(expected) == grpo.R
    assert grpo.A_r == pytest.approx(A)
    assert grpo.A_c == pytest.approx(A)
    plain, shaped = (score(objective(name="dcpo", **more), group) for more in ({}, options))
    assert shaped.A_r == pytest.approx(A)
    for name in ("targets", "R_c", "A_c"):
        assert getattr(shaped, name) == pytest.approx(getattr(plain, name)), name
    double = score(objective(name="coupled", overlong_penalty=2.0, **options), group)
    assert double.A_c == pytest.approx(double.A_r)
    assert (
        pytest.approx(score(objective(name="coupled"), group).R - np.array([0, 1, 2, 0]))
        == double.R
    )


def test_the_entropy_coefficient_finds_its_target() -> None:
    options = ObjectiveConfig(name="grpo", entropy_target=0.2)
    assert adapted_entropy_coef(0.0, 0.1, options) == (0.005, 0.005)
    assert adapted_entropy_coef(0.005, 0.2, options) == (0.01, 0.01)
    assert adapted_entropy_coef(0.01, 0.3, options) == (0.005, 0.0)
    assert adapted_entropy_coef(0.0, 0.3, options) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": "cispo", "dual_clip": 3.0}, "dual_clip goes with clip=ppo"),
        (
            {"name": "ccgspg", "ratio": "sequence"},
            "objective.ratio has no effect with objective.name=ccgspg",
        ),
        ({"name": "ccgspg", "clip": "cispo"}, "objective.clip has no effect"),
        (
            {"name": "posthoc", "overlong_buffer": 4},
            "objective.overlong_buffer has no effect with objective.name=posthoc",
        ),
        (
            {"loss_aggregation": "constant"},
            "loss_aggregation=constant needs objective.max_response_length above 0",
        ),
        (
            {"overlong_buffer": 9, "max_response_length": 9},
            "overlong_buffer needs objective.max_response_length above 9",
        ),
        (
            {"old_logprobs": "engine", "tis_level": "token"},
            "old_logprobs=engine goes with tis_level=none",
        ),
        (
            {"name": "ccgspg", "old_logprobs": "engine"},
            "objective.old_logprobs has no effect with objective.name=ccgspg",
        ),
        (
            {"entropy_target": 0.1, "entropy_coef": -0.1},
            "entropy_target needs entropy_coef_reasoning >= 0",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        resolve(ObjectiveConfig(**options))


def test_the_longest_response_is_that_of_the_rollout() -> None:
    config = load_config("examples/quickstart/losses/dr_grpo.yaml")
    assert config.objective.max_response_length == config.rollout.max_response_length == 32
    assert resolve(config.objective).max_response_length == 32
    assert INPUTS["correct"]  # the golden group is there
