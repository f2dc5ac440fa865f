"""The embedded engine's sampling: the right distribution, log-probs of what was sampled,
independent of the batch.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dcpo.data.datasets import draw_prompts
from megatron_dcpo.rollout.engine import PartialRollout
from megatron_dcpo.rollout.random_numbers import uniforms
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.transformers_engine import (
    TransformersEngine,
    branches_among,
    prefill,
    sample_token,
)
from megatron_dcpo.types import Prompt


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.5),
        SamplingConfig(top_k=2),
        SamplingConfig(top_p=0.7),
    ],
    ids=["plain", "temperature", "top_k", "top_p"],
)
def test_samples_follow_the_distribution_they_report(sampling):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -8.0]])
    random = (
        torch.arange(100_000, dtype=torch.float64) + 0.5
    ) / 100_000  # a grid: frequencies are exact
    token, logprob = sample_token(logits.expand(len(random), -1), random, sampling)
    p = torch.softmax(logits[0].double() / sampling.temperature, -1)
    allowed = torch.ones(5, dtype=torch.bool)
    if sampling.top_k:
        allowed[sampling.top_k :] = False
    if sampling.top_p < 1:  # 0.64 + 0.24 is the smallest set with mass 0.7
        allowed[2:] = False
    p = torch.where(allowed, p, 0.0) / p[allowed].sum()
    frequency = torch.bincount(token, minlength=5).double() / len(random)
    torch.testing.assert_close(frequency, p, atol=2e-5, rtol=0)
    torch.testing.assert_close(logprob.double().exp(), p[token], atol=1e-6, rtol=1e-5)


def test_temperature_0_is_the_most_probable_token():
    logits = torch.tensor([[2.0, 1.0, 0.0], [-1.0, 4.0, 3.9]])
    for random in (0.0, 0.5, 0.999):
        drawn = torch.full((2,), random, dtype=torch.float64)
        token, logprob = sample_token(logits, drawn, SamplingConfig(temperature=0.0))
        assert token.tolist() == [0, 1]
        assert logprob.tolist() == [0.0, 0.0]


@pytest.fixture(scope="module")
def engine(tiny_models):
    return TransformersEngine.from_pretrained(tiny_models("qwen3"), max_num_seqs=12)


@pytest.fixture(scope="module")
def windows(tiny_models):
    """Layers that attend to seven tokens, beside layers that attend to all."""
    return TransformersEngine.from_pretrained(tiny_models("gemma3"), max_num_seqs=12)


def prompts(count):
    rng = np.random.default_rng(0)
    ids = [tuple(int(t) for t in rng.integers(1, 331, 3 + i % 4)) for i in range(count)]
    return [Prompt(f"p{i}", (), ids[i], "", "t") for i in range(count)]


class LargestOutput(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes or copies."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_beginnings_are_run_without_a_copy_of_the_output_layer_for_each(engine):
    head = engine.model.get_output_embeddings().weight
    sequences = [[1 + i, 2, 3] for i in range(16)]
    with LargestOutput() as largest, torch.no_grad():
        logits, *_ = prefill(engine.model, sequences)
    assert logits.shape == (16, len(head))
    assert largest.elements < 4 * head.numel()


def branching():
    """Return a long sequence, three that leave it after 20, 41 and all but its last tokens, a copy,
    and two others.
    """
    rng = np.random.default_rng(1)

    def drawn(count):
        return [int(token) for token in rng.integers(1, 331, count)]

    long, short = drawn(60), drawn(50)
    return [
        drawn(5),
        long[:20] + drawn(19),
        long,
        long[:41] + drawn(3),
        long[:59],
        list(long),
        short,
    ]


def test_branches_are_what_another_sequence_does_not_have():
    sequences = branching()
    branches = branches_among(sequences)
    assert {number: (one.stem, one.common) for number, one in branches.items()} == {
        1: (2, 20),
        3: (2, 41),
        4: (2, 58),
        5: (2, 59),
    }
    for number, one in branches.items():
        assert sequences[one.stem][: one.common] + list(one.tokens) == sequences[number]
    unlike = [sequence[::-1] for sequence in sequences[:4]]
    assert branches_among(unlike) == {}
    assert branches_among([]) == {}


@pytest.mark.parametrize("which", ["engine", "windows"])
def test_branches_are_sampled_as_if_they_were_alone(request, which):
    engine = request.getfixturevalue(which)
    calls = [Prompt(f"b{i}", (), tuple(ids), "", "t") for i, ids in enumerate(branching())]
    sampling = SamplingConfig(n=1, max_tokens=20, seed=3)
    run = [0]
    count = engine.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: run.append(run[-1] + inputs[0].numel())
    )
    together = {one.prompt_id: one for one in engine.generate(calls, sampling)}
    count.remove()
    padded = len(calls) * 60
    assert (run[1] < padded) == (which == "engine")
    for call in calls:
        (alone,) = engine.generate([call], sampling)
        one = together[call.prompt_id]
        assert one.token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-4)


def test_response_does_not_depend_on_the_batch(engine):
    sampling = SamplingConfig(n=3, max_tokens=20, seed=5)
    together = engine.generate(prompts(7), sampling, step=2)
    alone = [r for prompt in prompts(7) for r in engine.generate([prompt], sampling, step=2)]
    assert [(r.prompt_id, r.sample_index) for r in together] == [
        (f"p{i}", k) for i in range(7) for k in range(3)
    ]
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    other = engine.generate(prompts(7), dataclasses.replace(sampling, seed=6), step=2)
    assert [r.token_ids.tolist() for r in other] != [r.token_ids.tolist() for r in together]


@pytest.mark.parametrize("which", ["engine", "windows"])
def test_logprobs_equal_a_forward_pass(request, which):
    """Left padding, repeated caches and dropped rows leave every log-prob what a plain forward pass
    gives.
    """
    engine = request.getfixturevalue(which)
    for prompt, group in zip(prompts(7), np.array_split(np.arange(21), 7), strict=True):
        responses = engine.generate(prompts(7), SamplingConfig(n=3, max_tokens=25, seed=1))
        for i in group:
            ids = torch.tensor([*prompt.token_ids, *responses[i].token_ids.tolist()])[None]
            logp = torch.log_softmax(engine.model(ids).logits[0], -1)[
                len(prompt.token_ids) - 1 : -1
            ]
            expected = logp.gather(-1, ids[0, len(prompt.token_ids) :, None]).squeeze(-1)
            np.testing.assert_allclose(responses[i].logprobs, expected.numpy(), atol=1e-4)
            ended = int(responses[i].token_ids[-1]) in engine.eos_token_ids
            assert responses[i].finish_reason == ("stop" if ended else "length")
            assert not set(responses[i].token_ids[:-1].tolist()) & set(engine.eos_token_ids)


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_response_that_is_continued_is_the_uninterrupted_one(engine, cut):
    """Whenever it was interrupted, and though another sample had taken its place: with the same
    weights the same tokens.
    """
    sampling = SamplingConfig(n=3, max_tokens=25, seed=5)
    whole = {
        (r.prompt_id, r.sample_index): r for r in engine.generate(prompts(7), sampling, step=2)
    }
    samples = [(prompt, index) for prompt in prompts(7) for index in range(3)]
    finished, begun, step, most = {}, {}, 2, 0
    while len(finished) < len(samples):
        todo = [(p, i) for p, i in samples if (p.prompt_id, i) not in finished]
        asked = iter(range(cut))
        partial = PartialRollout(lambda asked=asked: next(asked, cut) >= cut - 1, dict(begun))
        handed_over = [
            r for responses in engine.stream(todo, sampling, step, partial) for r in responses
        ]
        assert sorted((r.prompt_id, r.sample_index) for r in handed_over) == sorted(
            (p.prompt_id, i) for p, i in todo
        )
        for response in handed_over:
            into = begun if response.finish_reason == "abort" else finished
            into[response.prompt_id, response.sample_index] = response
        engine.weights_version, step = engine.weights_version + 1, step + 1
    for name, response in finished.items():
        assert response.token_ids.tolist() == whole[name].token_ids.tolist()
        np.testing.assert_allclose(response.logprobs, whole[name].logprobs, atol=1e-4)
        assert (response.finish_reason, response.step) == (whole[name].finish_reason, 2)
        if response.segments:
            versions, tokens = zip(*response.segments, strict=True)
            assert sum(tokens) == len(response.token_ids)
            assert list(versions) == sorted(set(versions))
            assert max(tokens) <= cut
        most = max(most, len(response.segments))
    assert most == -(-25 // cut), "the longest was interrupted as often as it can be"
    engine.weights_version = 0


def test_a_free_place_is_taken_by_the_next_sample(engine, monkeypatch):
    """Only where a rollout may be partial: otherwise a batch runs to its end, and its last
    responses alone.
    """
    monkeypatch.setattr(engine, "eos_token_ids", tuple(range(0, 331, 16)))  # many lengths
    sampling, used = SamplingConfig(max_tokens=40, seed=3, temperature=1.5), []
    samples = [(prompt, index) for prompt in prompts(10) for index in range(6)]
    for partial in (None, PartialRollout(lambda: False, {})):
        before = dataclasses.replace(engine.slot_steps)
        tokens = {}
        for responses in engine.stream(samples, sampling, 1, partial):
            tokens |= {(r.prompt_id, r.sample_index): r.token_ids.tolist() for r in responses}
        steps, live = (engine.slot_steps.total - before.total, engine.slot_steps.used - before.used)
        assert live == sum(map(len, tokens.values()))
        assert steps % 12 == 0
        used.append((tokens, live / steps))
    assert used[0][0] == used[1][0]
    assert used[1][1] > 1.3 * used[0][1]


def test_uniforms_are_counted():
    a = uniforms(1, 2, "p", 3, 10)
    assert np.array_equal(a, uniforms(1, 2, "p", 3, 10))
    assert np.array_equal(a[:5], uniforms(1, 2, "p", 3, 5)), "a longer limit keeps the numbers"
    assert all(
        not np.array_equal(a, uniforms(*key, 10))
        for key in [(2, 2, "p", 3), (1, 3, "p", 3), (1, 2, "q", 3), (1, 2, "p", 4)]
    )
    assert ((a >= 0) & (a < 1)).all()


def test_prompt_stream_is_a_function_of_seed_and_position():
    data = prompts(10)
    steps = [draw_prompts(data, first, 4, seed=1, shuffle=True) for first in range(0, 20, 4)]
    flat = [p.prompt_id for step in steps for p in step]
    assert sorted(flat[:10]) == sorted(f"p{i}@0" for i in range(10)), (
        "an epoch has every prompt once"
    )
    assert sorted(flat[10:]) == sorted(f"p{i}@1" for i in range(10))
    assert len(set(flat)) == 20, "a prompt met again is another group"
    assert [p.prompt_id for p in draw_prompts(data, 7, 9, seed=1, shuffle=True)] == flat[7:16]
    assert [p.prompt_id for p in draw_prompts(data, 0, 4, seed=1, shuffle=False)] == [
        "p0@0",
        "p1@0",
        "p2@0",
        "p3@0",
    ]


def test_logits_in_fp32(tiny_models):
    """Of a model in bf16 with ``head_dtype=fp32``: the product of its bf16 numbers, not rounded;
    off without a GPU.
    """
    directory, prompt = tiny_models("qwen3", True), Prompt("p", (), (5, 6, 7), "", "")
    sampling = SamplingConfig(max_tokens=4, top_k=1)
    seen = {}
    for head in ("auto", "model", "fp32"):
        engine = TransformersEngine.from_pretrained(directory, "bf16", head_dtype=head)
        (response,) = engine.generate([prompt], sampling)
        ids = torch.tensor([[*prompt.token_ids, *response.token_ids.tolist()[:-1]]])
        with torch.no_grad():
            hidden = engine.model.model(ids).last_hidden_state[0, 2:]
            seen[head] = engine.model.lm_head(hidden)
            exact = hidden.float() @ engine.model.lm_head.weight.float().t()
        torch.testing.assert_close(
            seen[head].float(), exact, atol=1e-6 if head == "fp32" else 0.05, rtol=1e-5
        )
    assert [seen[head].dtype for head in seen] == [torch.bfloat16, torch.bfloat16, torch.float32]
