"""A response in two segments: two sequences of the forward pass, one response in every denominator.

The model sums the states of all tokens so far, so that a token's log-prob depends on everything
that stands before it in its sequence, and on nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dcpo.policy import schedule
from megatron_dcpo.policy.batching import collate
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.training.dealing import Summary, _payload, fetch
from megatron_dcpo.types import (
    Judgement,
    MicroBatch,
    Prompt,
    Response,
    TokenOutputs,
    TrainingSample,
    replaced,
)
from tests.helpers.objective_cases import objective
from tests.helpers.samplers import one_rank
from tests.unit.policy.test_schedule import megatrons_schedule

VOCABULARY, HIDDEN = 11, 5
PROMPT = (1, 2)
FIRST, SECOND = (3, 4, 5, 6), (7, 8, 9)  # the tokens of the two segments
CONTEXT = (1, 2, 3, 10)  # of the second one


@pytest.fixture(autouse=True, scope="module")
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


class Sums(nn.Module):
    """Returns the sum of the states of the tokens up to each one, within its sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.states = nn.Embedding(VOCABULARY, HIDDEN)
        self.output = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))

    def forward(self, tokens: Tensor, positions: Tensor, *_: Any, **options: Any) -> Tensor:
        states: Tensor = self.states(tokens)
        packed = options.get("packed_seq_params")
        if packed is None:
            return states.cumsum(1)
        bounds = packed.cu_seqlens_q.tolist()
        pieces = [states[:, a:b].cumsum(1) for a, b in itertools.pairwise(bounds)]
        return torch.cat(pieces, 1)


def policy_of(model: Sums) -> Any:
    topology = SimpleNamespace(
        tp_group=dist.group.WORLD, tp_size=1, pp_size=1, cp_size=1, cp_rank=0, dp_size=1
    )
    return SimpleNamespace(
        chunks=[model],
        config=SimpleNamespace(sequence_parallel=False, bf16=False, no_sync_func=None),
        topology=topology,
        frozen=False,
        output_weight=model.output,
        arch=SimpleNamespace(vocab_size=VOCABULARY),
        fp32_head=False,
    )


def prompt(token_ids: Sequence[int] = PROMPT) -> Prompt:
    return Prompt("p", (), tuple(token_ids), "", "")


def response(token_ids: Sequence[int], index: int = 0, **fields: Any) -> Response:
    ids = np.array(token_ids, np.int64)
    return Response("p", index, ids, np.full(len(ids), -1.0, np.float32), "stop", 0, **fields)


def judged(one: Response, correct: float, confidence: float, boundary: int) -> TrainingSample:
    length = len(one.token_ids)
    judgement = Judgement("p", correct, confidence, "ok", boundary=boundary, length=length)
    return TrainingSample(prompt(), one, judgement)


def group() -> list[TrainingSample]:
    """A response of two segments, whose third token was written, and one of one segment."""
    mask = np.array([True, True, False, True, True, True, True])
    two = response(
        [*FIRST, *SECOND],
        contexts=((0, len(PROMPT)), (len(FIRST), len(CONTEXT))),
        context_ids=np.array([*PROMPT, *CONTEXT]),
        loss_mask=mask,
        answer_from=len(FIRST),
    )
    one = response((5, 6, 7), index=1)
    return [judged(two, 1.0, 0.7, boundary=5), judged(one, 0.0, 0.6, boundary=2)]


def by_hand(model: Sums, scored: Sequence[TrainingSample]) -> Tensor:
    """-sum of w A log p over both segments and the other response, each behind its own context."""
    total = torch.zeros(())
    two, one = scored
    begun = 0
    for sample, context, ids in (
        (two, PROMPT, FIRST),
        (two, CONTEXT, SECOND),
        (one, PROMPT, (5, 6, 7)),
    ):
        if sample is one:
            begun = 0
        assert sample.weights is not None
        assert sample.advantages is not None
        states = model.states(torch.tensor([*context, *ids])).cumsum(0)
        logprobs = torch.log_softmax(states @ model.output.t(), -1)
        for number, token in enumerate(ids):
            push = sample.weights[begun + number] * sample.advantages[begun + number]
            total = total - float(push) * logprobs[len(context) + number - 1, token]
        begun += len(ids)
    return total


def pushed(batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    pushes = batch.columns["weights"] * batch.columns["advantages"]
    return -pushes * outputs.logprobs, {}


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("splits", [[[0, 1]], [[1], [0]]])
def test_loss_and_gradient_are_those_of_the_segments_with_one_denominator(
    monkeypatch: pytest.MonkeyPatch, splits: list[list[int]], packing: bool, separable: bool
) -> None:
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: megatrons_schedule(1))
    method = objective(name="dcpo", loss_aggregation="sequence_mean")
    scored = method.score(group())
    weights = scored[0].weights
    assert weights is not None
    # two responses, of which the first has six sampled tokens in its two segments
    expected_weights = np.full(7, 1 / (2 * 6))
    expected_weights[2] = 0.0
    np.testing.assert_allclose(weights, expected_weights)

    model = Sums()
    expected = by_hand(model, scored)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    parts = accumulate_gradients(
        policy_of(model),
        scored,
        splits,
        pushed,
        temperature=1.0,
        packing=packing,
        separable=separable,
    )
    assert sum(part["loss"] for part in parts) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_session_of_several_segments_is_one_in_its_group() -> None:
    method = objective(name="dcpo", loss_aggregation="sequence_mean")
    apart = group()
    whole = [replaced(one, response=replaced(one.response, contexts=())) for one in apart]
    np.testing.assert_array_equal(method.group_scores(apart), method.group_scores(whole))
    assert method.is_informative(apart) == method.is_informative(whole) is True
    for one, other in zip(method.score(apart), method.score(whole), strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
        np.testing.assert_allclose(one.weights, other.weights)


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_are_those_of_two_responses(
    monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: megatrons_schedule(1))
    model = Sums()
    apart = [
        replaced(group()[1], prompt=prompt(context), response=response(ids))
        for context, ids in ((PROMPT, FIRST), (CONTEXT, SECOND))
    ]
    together, _ = compute_logprobs(
        policy_of(model), group(), [[1, 0]], temperature=0.7, packing=packing
    )
    first, second = compute_logprobs(
        policy_of(model), apart, [[0, 1]], temperature=0.7, packing=packing
    )
    np.testing.assert_allclose(together, [*first, *second], rtol=1e-5)


def test_sizes_count_the_contexts_and_are_known_without_the_tokens() -> None:
    two, one = group()
    assert two.sequence_lengths == (len(PROMPT) + 4, len(CONTEXT) + 3)
    assert (two.length, one.length) == (13, 5)
    away = Summary.of(two.response).restored(holder=0)
    assert away.context_ids is None
    elsewhere = replaced(two, response=away)
    assert elsewhere.sequence_lengths == two.sequence_lengths
    assert elsewhere.length == two.length


@pytest.mark.parametrize(("packing", "shape"), [(False, (3, 7)), (True, (1, 18))])
def test_each_segment_is_a_sequence_of_its_own(packing: bool, shape: tuple[int, int]) -> None:
    (batch,) = collate(group(), [[0, 1]], packing=packing, for_loss=False)
    assert tuple(batch.tokens.shape) == shape
    flat = batch.tokens.reshape(-1)
    before = [2, 3, 4, 5, 10, 7, 8, 2, 5, 6]
    assert flat[batch.rows].tolist() == before
    assert batch.targets.tolist() == [*FIRST, *SECOND, 5, 6, 7]
    assert batch.sequence_ids.tolist() == [0] * 7 + [1] * 3
    if packing:
        assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 6, 13, 18]


def test_the_contexts_travel_with_the_tokens() -> None:
    whole = group()[0]
    away = replaced(whole, response=Summary.of(whole.response).restored(holder=0))

    class Holder:
        """The other side: it asks for nothing, and sends what was asked for."""

        ranks = (0,)
        answers = ([[]], [[_payload(whole.response)]])

        def exchange(self, messages: object) -> object:
            answer, *rest = self.answers
            self.answers = tuple(rest)
            return answer

    collectives: Any = Holder()
    (back,) = fetch([away], [0], collectives)
    assert [sequence.input_ids.tolist() for sequence in back.sequences] == [
        [*PROMPT, *FIRST],
        [*CONTEXT, *SECOND],
    ]
