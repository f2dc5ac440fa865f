"""Statistics are of the tokens that the policy sampled, whatever a tool wrote between them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_dcpo.evaluation.measuring import measured_sample
from megatron_dcpo.evaluation.scoring import CONFIDENCE_KINDS
from megatron_dcpo.objectives import ObjectiveConfig, build_method
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample

PROMPT = Prompt("p", (), (1, 2), "", "")


def response(index: int, written: int) -> Response:
    """Four sampled tokens, and then some that a tool wrote."""
    mask = np.array([True] * 4 + [False] * written)
    logprobs = np.where(mask, -0.1, 0.0).astype(np.float32)
    ids = np.arange(len(mask))
    return Response("p", index, ids, logprobs, "stop", 0, loss_mask=mask)


@pytest.mark.parametrize("of_tool", [-5.0, -0.001])
def test_ccgspg_averages_over_sampled_tokens(of_tool: float) -> None:
    samples = []
    for index, written in enumerate((4, 0)):
        one = response(index, written)
        old = np.where(one.loss_mask, -0.1, of_tool).astype(np.float32)
        length = len(one.token_ids)
        judgement = Judgement("p", 1.0 - index, None, "missing", length - 1, length)
        samples.append(TrainingSample(PROMPT, one, judgement, old_logprobs=old))
    method = build_method(ObjectiveConfig(name="ccgspg"))
    expected = 0.5 / (1 - math.exp(-0.1))
    assert method.group_scores(samples)[3] == pytest.approx([expected, -expected], rel=1e-4)


def test_token_confidence_is_of_sampled_tokens() -> None:
    one = response(0, 19)
    judgement = Judgement("p", 1.0, None, "missing", 10, 23, sampled_tokens=one.sampled_length)
    sample = measured_sample(PROMPT, one, judgement, keep_features=False)
    assert sample.measures.token_confidence == pytest.approx(math.exp(-0.1))
    assert sample.measures.reasoning_logprob == pytest.approx(-0.4)
    assert CONFIDENCE_KINDS["token_product"](sample) == pytest.approx(math.exp(-0.4))
    plain = replace(one, loss_mask=None)
    assert (one.sampled_length, plain.sampled_length) == (4, 23)


@pytest.mark.parametrize("name", ["grpo", "coupled", "rlcr"])
def test_a_preset_leaves_methods_with_one_advantage_one(name: str) -> None:
    """Four groups of two, one of them with a right and a wrong answer."""
    samples = []
    for number, prompt_id in enumerate("abcd"):
        for index, c in enumerate((0.9, 0.2)):
            R = float((number == 0 and index == 0) or number in (1, 2))
            judgement = Judgement(prompt_id, R, c, "ok", 2, 4)
            one = replace(response(index, 0), prompt_id=prompt_id)
            prompt = replace(PROMPT, prompt_id=prompt_id)
            samples.append(TrainingSample(prompt, one, judgement))
    method = build_method(ObjectiveConfig(name=name, preset="dcpo_proper"))
    for sample in method.score(samples):
        assert sample.advantages is not None
        assert len(set(sample.advantages.tolist())) == 1
