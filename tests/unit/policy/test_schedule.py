"""The loss of an optimizer step is the plain sum over tokens: however micro-batches, ranks and
Megatron's divisions cut it. The model is an embedding, so that every gradient is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dcpo.policy import schedule
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.types import MicroBatch, TokenOutputs, TrainingSample, replaced
from tests.helpers.samplers import one_rank
from tests.helpers.samples import bare

VOCABULARY, HIDDEN = 13, 6


@pytest.fixture(autouse=True, scope="module")
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


class Embedding(nn.Module):
    """Returns the hidden state of each token by itself, [b, s, h]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.states = nn.Embedding(VOCABULARY, HIDDEN)
        self.output = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        states: Tensor = self.states(tokens)
        return states


def policy_of(model: Embedding, replicas: int = 1, frozen: bool = False) -> Any:
    topology = SimpleNamespace(
        tp_group=dist.group.WORLD, tp_size=1, pp_size=1, cp_size=1, cp_rank=0, dp_size=replicas
    )
    return SimpleNamespace(
        chunks=[model],
        config=SimpleNamespace(sequence_parallel=False, bf16=False, no_sync_func=None),
        topology=topology,
        frozen=frozen,
        output_weight=model.output,
        arch=SimpleNamespace(vocab_size=VOCABULARY),
        fp32_head=False,
    )


def megatrons_schedule(replicas: int) -> Callable[..., Any]:
    """Return what ``forward_backward_no_pipelining`` does to a loss: it divides by ``num_tokens``
    and by the number of micro-batches (``forward_step_calc_loss`` in
    megatron/core/pipeline_parallel/schedules.py); DDP averages over ``replicas``.
    """

    def run(**options: Any) -> list[Any]:
        results = []
        for _ in range(options["num_microbatches"]):
            output, close = options["forward_step_func"](
                options["data_iterator"], options["model"][0]
            )
            if options["forward_only"]:
                results.append(close(output, non_loss_data=True))
                continue
            loss, num_tokens, statistics = close(output)
            (loss / num_tokens / options["num_microbatches"] / replicas).backward()
            results.append(statistics)
        return results

    return run


def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(3)
    drawn = []
    for length in (3, 1, 6, 4, 2):
        sample = bare(rng.integers(0, VOCABULARY, 2), rng.integers(0, VOCABULARY, length))
        weights = rng.uniform(0.1, 1.0, length)
        blocks = np.ones(length, np.int8)
        drawn.append(replaced(sample, R=1.0, weights=weights, advantages=weights, block_ids=blocks))
    return drawn


def weighted(batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-w log p of every token, and how many there are."""
    contributions = -batch.columns["weights"] * outputs.logprobs
    return contributions, {"tokens": torch.ones_like(outputs.logprobs).sum()}


def plain_sum(model: Embedding, temperature: float) -> Tensor:
    """-sum w log softmax(W h / T), token by token: the state before a token predicts it."""
    total = torch.zeros(())
    for sample in samples():
        ids = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
        count = len(sample.response_ids)
        logits = model.states(ids[-count - 1 : -1]) @ model.output.t() / temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[-count:, None])[:, 0]
        total = total - (torch.as_tensor(sample.weights, dtype=torch.float32) * logprobs).sum()
    return total


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("splits", [[[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]]])
@pytest.mark.parametrize("replicas", [1, 4])
def test_the_gradient_is_that_of_the_plain_sum_over_tokens(
    monkeypatch: pytest.MonkeyPatch,
    splits: list[list[int]],
    packing: bool,
    separable: bool,
    replicas: int,
) -> None:
    """d/dθ Σ_t u_t: neither the number of micro-batches nor that of replicas appears in it."""
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: megatrons_schedule(replicas))
    model = Embedding()
    expected = plain_sum(model, temperature=0.7)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    parts = accumulate_gradients(
        policy_of(model, replicas),
        samples(),
        splits,
        weighted,
        temperature=0.7,
        packing=packing,
        separable=separable,
    )
    assert sum(part["loss"] for part in parts) == pytest.approx(expected.item(), rel=1e-5)
    assert sum(part["tokens"] for part in parts) == 16
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_the_gradients_of_a_frozen_policy_are_sums_over_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its adapter is not averaged by DDP, so nothing is multiplied back."""
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: megatrons_schedule(1))
    model = Embedding()
    (expected,) = torch.autograd.grad(plain_sum(model, temperature=1.0), [model.states.weight])
    accumulate_gradients(
        policy_of(model, replicas=4, frozen=True),
        samples(),
        [[0, 1], [2, 3, 4]],
        weighted,
        temperature=1.0,
        packing=False,
    )
    torch.testing.assert_close(model.states.weight.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_come_back_in_the_order_of_the_samples(
    monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    """log softmax(W h_{t-1} / T) at token t, float32 [T_i] a sample, whatever the micro-batches."""
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: megatrons_schedule(1))
    model = Embedding()
    rows = compute_logprobs(
        policy_of(model), samples(), [[4, 2], [0], [3, 1]], temperature=0.5, packing=packing
    )
    assert [len(row) for row in rows] == [len(sample.response_ids) for sample in samples()]
    total = -sum(float(sample.weights @ row) for sample, row in zip(samples(), rows, strict=True))
    assert total == pytest.approx(plain_sum(model, temperature=0.5).item(), rel=1e-5)
