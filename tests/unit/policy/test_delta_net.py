"""The gated delta rule in chunks is the recurrence, token by token; what was never tried
is refused.
"""

import pytest
import torch

from megatron_dcpo.config import ModelConfig, ParallelConfig, validate
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.machine import Machine
from megatron_dcpo.planning.plan import make_plan
from megatron_dcpo.policy import model as model_module
from megatron_dcpo.policy.delta_net import CHUNK, gated_delta_rule
from megatron_dcpo.policy.model import build_policy


def recurrence(query, key, value, log_decay, beta):
    """What each token reads, in fp64."""
    inputs = [x.double() for x in (query, key, value, log_decay, beta)]
    query, key, value, log_decay, beta = inputs
    query = query / query.norm(dim=-1, keepdim=True) * query.shape[-1] ** -0.5
    key = key / key.norm(dim=-1, keepdim=True)
    state = torch.zeros(*query.shape[0:3:2], key.shape[-1], value.shape[-1]).double()
    read = []
    for t in range(query.shape[1]):
        state = log_decay[:, t, :, None, None].exp() * state
        answer = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        correction = beta[:, t, :, None] * (value[:, t] - answer)
        state = state + key[:, t, :, :, None] * correction[:, :, None]
        read.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(read, dim=1)


@pytest.mark.parametrize("tokens", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_chunks_are_the_recurrence(tokens):
    generator = torch.Generator().manual_seed(tokens)

    def random(*channels):
        return torch.randn(2, tokens, 3, *channels, generator=generator)

    inputs = {
        "query": random(8),
        "key": random(8),
        "value": random(5),
        "log_decay": -0.3 * random().exp(),
        "beta": random().sigmoid(),
    }
    found = gated_delta_rule(**inputs)
    assert found.shape == (2, tokens, 3, 5)
    torch.testing.assert_close(found.double(), recurrence(**inputs), atol=1e-5, rtol=0)


def test_a_forgotten_state_stays_finite():
    """A head that forgets everything at once, over many chunks: no infinity, and no NaN in the
    gradient.
    """
    tokens = 3 * CHUNK
    query = torch.randn(1, tokens, 1, 4, generator=torch.Generator().manual_seed(0))
    log_decay = torch.full((1, tokens, 1), -200.0).requires_grad_()
    read = gated_delta_rule(
        query=query, key=query, value=query, log_decay=log_decay, beta=torch.ones(1, tokens, 1)
    )
    # each token reads its own value, by the half of its query's length
    torch.testing.assert_close(read, query / 2, atol=1e-5, rtol=0)
    read.sum().backward()
    assert log_decay.grad.isfinite().all()


def test_transformer_engines_layers_are_refused(tiny_models, monkeypatch):
    """Where ``auto`` finds them, on a GPU."""
    monkeypatch.setattr(model_module, "use_transformer_engine", lambda choice: True)
    model = ModelConfig(path=str(tiny_models("qwen3_5")))
    with pytest.raises(UserError, match=r"model\.transformer_impl=local"):
        build_policy(model, ParallelConfig(), topology=None, training=False)


def test_a_plan_is_refused(tiny_models):
    model = {"path": str(tiny_models("qwen3_5"))}
    config = validate({"run_dir": "r", "model": model, "data": {"path": "d"}})
    with pytest.raises(UserError, match="gated delta nets"):
        make_plan(config, Machine(gpus=1))
