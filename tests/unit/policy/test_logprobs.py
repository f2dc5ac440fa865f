"""Vocabulary-parallel log-probs on one rank: equal to log_softmax, padding columns cut off, gradients exact."""

import pytest
import torch

from megatron_dcpo.policy import logprobs as module
from megatron_dcpo.policy.logprobs import candidate_logprobs, vocab_parallel_logprobs


@pytest.mark.parametrize("chunk", [7, 1 << 26])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_and_its_gradient(monkeypatch, chunk, temperature):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(5, 16, dtype=torch.float32, requires_grad=True)
    targets = torch.tensor([0, 3, 9, 10, 4])
    weight = torch.randn(5)
    lp, h = vocab_parallel_logprobs(logits, targets, vocab_size=11, temperature=temperature, with_entropy=True)
    ((lp * weight).sum() + (h * weight.flip(0)).sum()).backward()

    reference = logits.detach().clone().requires_grad_()
    logp = torch.log_softmax(reference[:, :11] / temperature, -1)
    expected = logp.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    ((expected * weight).sum() + (entropy * weight.flip(0)).sum()).backward()
    torch.testing.assert_close(lp, expected)
    torch.testing.assert_close(h, entropy)
    torch.testing.assert_close(logits.grad, reference.grad)
    assert torch.all(logits.grad[:, 11:] == 0), "padding columns have no gradient"


def test_padding_columns_would_change_the_answer():
    """Negative control: with the padded width as vocabulary the log-probs differ, so the cut is not idle."""
    logits, targets = torch.zeros(1, 16), torch.tensor([0])
    assert vocab_parallel_logprobs(logits, targets, vocab_size=11)[0].item() == pytest.approx(-torch.tensor(11.0).log())
    assert vocab_parallel_logprobs(logits, targets, vocab_size=16)[0].item() == pytest.approx(-torch.tensor(16.0).log())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_alternatives_equal_log_softmax_and_its_gradient(temperature):
    torch.manual_seed(1)
    logits = torch.randn(5, 16, requires_grad=True)
    targets, rows = torch.tensor([0, 3, 9, 10, 4]), torch.tensor([1, 4, 4])
    ids = torch.tensor([[3, 7, -1], [0, 10, 4], [2, 2, 5]])
    weight = torch.randn(3, 3).masked_fill(ids < 0, 0.0)
    lp, _ = vocab_parallel_logprobs(logits, targets, vocab_size=11, temperature=temperature)
    found = candidate_logprobs(logits, targets, lp, rows, ids, temperature=temperature)
    (found.masked_fill(ids < 0, 0.0) * weight).sum().backward()

    reference = logits.detach().clone().requires_grad_()
    logp = torch.log_softmax(reference[:, :11] / temperature, -1)[rows]
    expected = logp.gather(-1, ids.clamp(min=0))
    (expected * weight).sum().backward()
    torch.testing.assert_close(found[ids >= 0], expected[ids >= 0])
    assert torch.all(found[ids < 0] == -torch.inf), "what the vocabulary lacks has no probability"
    torch.testing.assert_close(logits.grad, reference.grad)
