"""What evaluation asks of the embedded engine: log-probs of the raw logits, and the largest of
every position.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.types import Prompt
from tests.helpers.paths import QUICKSTART

POLICY = QUICKSTART / "policy"


def test_raw_log_probs_are_of_the_model_whatever_the_sampling() -> None:
    engine = TransformersEngine.from_pretrained(POLICY)
    prompts = [Prompt("a", (), (5, 6, 7), "", "t"), Prompt("b", (), (8, 9), "", "t")]
    options = {"n": 2, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 12, "seed": 3}
    sampled = engine.generate(prompts, SamplingConfig(**options))
    raw = engine.generate(prompts, SamplingConfig(**options, raw_logprobs=True, top_logprobs=20))
    for prompt, before, after in zip(
        [p for p in prompts for _ in range(2)], sampled, raw, strict=True
    ):
        np.testing.assert_array_equal(
            before.token_ids, after.token_ids
        )  # what is reported changes, not what is drawn
        assert before.top_logprobs is None
        ids = torch.tensor([[*prompt.token_ids, *after.token_ids.tolist()]])
        with torch.no_grad():
            logp = torch.log_softmax(
                engine.model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float(), -1
            )
        chosen = logp.gather(-1, torch.tensor(after.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(after.logprobs, chosen.numpy(), atol=2e-5)
        np.testing.assert_allclose(after.top_logprobs, logp.topk(20).values.numpy(), atol=2e-5)
        assert (
            before.logprobs >= after.logprobs - 1e-5
        ).mean() > 0.5  # truncation and cooling mostly raise them


def test_more_top_log_probs_than_tokens_are_all_of_them() -> None:
    engine = TransformersEngine.from_pretrained(POLICY)
    size = engine.model.config.vocab_size
    found = engine.generate(
        [Prompt("a", (), (5,), "", "t")], SamplingConfig(max_tokens=2, top_logprobs=10 * size)
    )
    assert found[0].top_logprobs is not None
    assert found[0].top_logprobs.shape == (len(found[0].token_ids), size)
    assert np.exp(found[0].top_logprobs).sum(-1) == pytest.approx(1.0, abs=1e-5)
