"""The output layer on one rank: equal to log_softmax over the true vocabulary, in any chunks, in
one pass and in two.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dcpo.policy import output_layer
from megatron_dcpo.policy.output_layer import OutputLayer, fused_loss, token_outputs
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.types import TokenOutputs

VOCABULARY, PADDED, HIDDEN = 11, 16, 5
TARGETS = torch.tensor([0, 3, 9, 10, 4, 1, 2])
WEIGHTS = torch.linspace(-1, 1, 7), torch.linspace(2, -1, 7)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(7, HIDDEN, dtype=dtype), torch.randn(PADDED, HIDDEN, dtype=dtype))
    return hidden.requires_grad_(), weight.requires_grad_()


def loss(rows: slice, outputs: TokenOutputs, entropy: bool = True) -> Tensor:
    """Not linear in the log-probs, so that a gradient taken at other values would differ."""
    total = (outputs.logprobs.exp() * WEIGHTS[0][rows]).sum()
    return total + (outputs.entropy * WEIGHTS[1][rows]).sum() if entropy else total


def reference(hidden: Tensor, weight: Tensor, temperature: float, entropy: bool):
    logp = torch.log_softmax((hidden @ weight.t())[:, :VOCABULARY].float() / temperature, -1)
    outputs = TokenOutputs(
        logp.gather(-1, TARGETS[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)
    )
    value = loss(slice(0, 7), outputs, entropy)
    return outputs, value, torch.autograd.grad(value, (hidden, weight))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 112])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_and_its_gradients(monkeypatch, temperature, chunk, passes, entropy):
    monkeypatch.setattr(output_layer, "CHUNK_ROWS", chunk)
    monkeypatch.setattr(output_layer, "BLOCK_ELEMENTS", min(chunk, 2) * VOCABULARY // 4)
    hidden, weight = inputs()
    expected, value, gradients = reference(hidden, weight, temperature, entropy)
    layer = OutputLayer.of(weight, VOCABULARY, temperature)
    if passes == 1:
        total, found = fused_loss(
            layer, hidden, TARGETS, lambda *a: loss(*a, entropy=entropy), upstream=0.5
        )
    else:
        found = token_outputs(layer, hidden, TARGETS)
        total = loss(slice(0, 7), found, entropy)
    torch.testing.assert_close(total, value)
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    (total * 3).backward()
    for tensor, gradient in zip((hidden, weight), gradients, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * gradient)
    assert torch.all(weight.grad[VOCABULARY:] == 0), "padding has no gradient"


def test_padding_would_change_the_answer():
    """Negative control: with the padded width as vocabulary the log-probs differ, so the cut is not
    idle.
    """
    hidden, weight = torch.zeros(1, HIDDEN), torch.zeros(PADDED, HIDDEN)
    for vocabulary in (VOCABULARY, PADDED):
        found = token_outputs(OutputLayer.of(weight, vocabulary), hidden, torch.tensor([0]))
        assert found.logprobs.item() == pytest.approx(-torch.tensor(float(vocabulary)).log())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("tied", "overlapped"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_added_to_megatrons_buffer(monkeypatch, dtype, tied, overlapped, passes):
    monkeypatch.setattr(output_layer, "CHUNK_ROWS", 3)
    monkeypatch.setattr(output_layer, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(output_layer, "PRODUCT_ELEMENTS", 3 * HIDDEN)
    hidden, weight = inputs(dtype)
    _, _, (by_hidden, by_weight) = reference(
        *(x.detach().float().requires_grad_() for x in (hidden, weight)), 1.0, True
    )
    weight.main_grad = torch.ones(PADDED, HIDDEN)
    weight.grad_added_to_main_grad = False
    if tied:
        weight.zero_out_wgrad = True
    layer = OutputLayer.of(weight, VOCABULARY, overlapped=overlapped)
    if passes == 1:
        total, _ = fused_loss(layer, hidden, TARGETS, loss, upstream=2.0)
    else:
        total = loss(slice(0, 7), token_outputs(layer, hidden, TARGETS))
    (total * 2).backward()
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    torch.testing.assert_close(weight.main_grad, 1 + 2 * by_weight, **tolerance)
    torch.testing.assert_close(hidden.grad.float(), 2 * by_hidden, **tolerance)
    # autograd's own gradient is not counted: DDP's hook drops it, a tied weight has the embedding's
    told = overlapped and not tied
    assert (weight.grad is not None) == told
    assert weight.grad_added_to_main_grad == told


@pytest.mark.parametrize("passes", [1, 2])
def test_no_rows_leave_the_graph_whole(passes):
    hidden, weight = (
        torch.zeros(0, HIDDEN, requires_grad=True),
        torch.ones(PADDED, HIDDEN, requires_grad=True),
    )
    layer, targets = OutputLayer.of(weight, VOCABULARY), TARGETS[:0]
    if passes == 1:
        total, _ = fused_loss(layer, hidden, targets, lambda rows, outputs: outputs.logprobs.sum())
    else:
        total = token_outputs(layer, hidden, targets).logprobs.sum()
    total.backward()
    assert hidden.grad.shape == (0, HIDDEN)
    assert torch.all(weight.grad == 0)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_sure_token_keeps_its_gradient(passes):
    """fp32 cannot hold p = 1 - 1e-9; the gradient is 1 - p, and right relative to float64."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[21.0, 1.0], [0.0, 2.0], [-1.0, 0.5]], requires_grad=True)
    layer, targets = OutputLayer.of(weight, 3), torch.tensor([0])
    if passes == 1:
        total, _ = fused_loss(layer, hidden, targets, lambda rows, outputs: outputs.logprobs.sum())
    else:
        total = token_outputs(layer, hidden, targets).logprobs.sum()
    total.backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = torch.log_softmax(exact[0] @ exact[1].t(), -1)[:, 0].sum()
    for found, expected in zip((hidden, weight), torch.autograd.grad(logp, exact), strict=True):
        torch.testing.assert_close(found.grad.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), logp, rtol=1e-5, atol=0)


@pytest.mark.parametrize("passes", [1, 2])
def test_logits_of_bf16_are_not_rounded(passes):
    """Of a head in fp32 the log-probs are those of the bf16 numbers' product in fp32, to 1e-5;
    without it they are as far away as rounding logits of about 20 to 8 bits makes them.
    """
    torch.manual_seed(0)
    hidden, weight = (torch.randn(7, 64).bfloat16(), (2.5 * torch.randn(PADDED, 64)).bfloat16())
    exact = torch.log_softmax((hidden.float() @ weight.float().t())[:, :VOCABULARY], -1)
    exact = exact.gather(-1, TARGETS[:, None]).squeeze(-1)

    def found(fp32):
        layer = OutputLayer.of(weight, VOCABULARY, fp32=fp32)
        if passes == 2:
            return token_outputs(layer, hidden, TARGETS).logprobs
        return fused_loss(layer, hidden.clone().requires_grad_(), TARGETS, loss)[1].logprobs

    torch.testing.assert_close(found(True), exact, atol=1e-5, rtol=1e-6)
    assert (found(False) - exact).abs().max() > 1e-2


def test_fp32_is_what_it_was(monkeypatch):
    """Bit for bit, whatever the head is asked for: the product is of fp32 already."""
    monkeypatch.setattr(output_layer, "fp32_product", None)
    both = []
    for fp32 in (False, True):
        hidden, weight = inputs()
        total, found = fused_loss(
            OutputLayer.of(weight, VOCABULARY, 0.6, fp32=fp32), hidden, TARGETS, loss
        )
        total.backward()
        both.append([total, found.logprobs, found.entropy, hidden.grad, weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_torch_takes_the_type_of_the_sum():
    """What ``fp32_product`` asks of CUDA, by the shapes and types alone: the CPU has no kernel for
    it.
    """
    a, b, out = (torch.empty(n, m, dtype=t, device="meta") for n, m, t in SHAPES)
    assert torch.mm(a, b, out_dtype=torch.float32, out=out) is out
    assert torch.addmm(out, a, b, out_dtype=torch.float32, out=out) is out


@pytest.mark.parametrize("passes", [1, 2])
def test_where_products_are_in_fp32_the_weight_gradient_is_not_rounded(monkeypatch, passes):
    """The product of a GPU, in fp32 here: what is left is the rounding of its bf16 factors."""
    hidden, weight = inputs(torch.bfloat16)
    _, _, (_, exact) = reference(
        *(x.detach().float().requires_grad_() for x in (hidden, weight)), 1.0, True
    )

    def gradient():
        weight.main_grad = torch.zeros(PADDED, HIDDEN)
        weight.grad_added_to_main_grad = False
        layer = OutputLayer.of(weight, VOCABULARY)
        if passes == 1:
            fused_loss(layer, hidden, TARGETS, loss)[0].backward()
        else:
            loss(slice(0, 7), token_outputs(layer, hidden, TARGETS)).backward()
        return weight.main_grad

    rounded = gradient()
    monkeypatch.setattr(
        output_layer, "capabilities", lambda: replace(capabilities(), fp32_products=True)
    )
    monkeypatch.setattr(
        output_layer,
        "add_fp32_product",
        lambda sums, a, b: sums.addmm_(a.float(), b.float()),
    )
    errors = [(found - exact).norm() for found in (rounded, gradient())]
    assert errors[1] < errors[0]


SHAPES = (4, 8, torch.bfloat16), (8, 6, torch.bfloat16), (4, 6, torch.float32)


def test_ranks_with_and_without_padding_reduce_the_same_rows(monkeypatch):
    """Tensor-parallel ranks reduce a chunk's numbers together, and the padding is on the last."""
    monkeypatch.setattr(output_layer, "CHUNK_ROWS", 1)
    monkeypatch.setattr(output_layer, "BLOCK_ELEMENTS", 5 * 64 // 4)
    hidden, weight = torch.zeros(40, HIDDEN), torch.zeros(64, HIDDEN)
    targets = torch.zeros(40, dtype=torch.int64)
    rows = []
    for tokens in (64, 50, 0):
        layer = OutputLayer.of(weight, tokens)
        rows.append([len(chunk.p) for chunk in output_layer._chunks(layer, hidden, targets)])
    assert rows == [[5] * 8] * 3
