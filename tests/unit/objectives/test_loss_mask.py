"""Tokens that the policy did not sample are in no block: they have no weight and change
nobody's.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dcpo.types import BLOCK_NONE, Judgement, replaced
from tests.helpers.objective_cases import objective, samples_of

JUDGEMENTS = [
    Judgement("p", 1.0, 0.9, "ok", boundary=4, length=6),
    Judgement("p", 0.0, 0.8, "ok", boundary=3, length=5),
]


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "block_mean"])
def test_a_tools_tokens_have_no_weight(aggregation: str) -> None:
    """The other weights are those of the response without them."""
    method = objective(loss_aggregation=aggregation)
    first, second = samples_of(JUDGEMENTS)
    mask = np.array([True, False, False, True, True, True])
    masked = replaced(first, response=replaced(first.response, loss_mask=mask))
    scored, _ = method.score([masked, second])
    assert scored.block_ids is not None
    assert scored.weights is not None
    assert scored.advantages is not None
    assert (scored.block_ids[~mask] == BLOCK_NONE).all()
    assert not scored.weights[~mask].any()
    assert not scored.advantages[~mask].any()

    shorter = [Judgement("p", 1.0, 0.9, "ok", boundary=2, length=4), JUDGEMENTS[1]]
    reference, _ = method.score(samples_of(shorter))
    assert reference.weights is not None
    np.testing.assert_array_equal(scored.weights[mask], reference.weights)
    assert reference.advantages is not None
    np.testing.assert_array_equal(scored.advantages[mask], reference.advantages)
