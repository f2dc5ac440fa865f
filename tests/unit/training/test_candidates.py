"""The confidences behind an answer as sequences, and their expected Brier score: against all the
texts, one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dcpo.objectives.expected_brier import expected_brier
from megatron_dcpo.objectives.supervised import cross_entropy
from megatron_dcpo.policy.batching import collate, sequence_length
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.training.candidates import Candidates, JudgedAnswer, TextAnswer
from megatron_dcpo.training.confidence_adapter import reading_of
from megatron_dcpo.training.supervised import samples_of
from megatron_dcpo.types import TokenOutputs
from tests.helpers.paths import QUICKSTART

DIGITS = load_tokenizer(QUICKSTART / "policy")
VOCABULARY = 300
CONFIDENCES = np.arange(101) / 100


def with_numbers() -> PreTrainedTokenizerFast:
    """A tokenizer whose numbers of up to two digits are one token, as Llama's have three."""
    words = ["<conf>", "Confidence", ":", " ", "."]
    words += [str(n) for n in range(10)] + [f"{n:02d}" for n in range(100)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    pattern = r"[0-9]{1,2}|<conf>|Confidence|."
    from tokenizers import Regex

    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def logits(ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probs of the next token: random ones that depend on all tokens before."""
    seed = int(np.int64(hash(ids) & 0x7FFFFFFF))
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    return values.log_softmax(-1)


def scored(sample: Any) -> np.ndarray:
    """The log-probs of a sample's tokens, each at its place."""
    ids = tuple(sample.input_ids.tolist())
    return np.array(
        [
            float(logits(ids[: place + 1])[token])
            for place, token in zip(sample.places, sample.response_ids, strict=True)
        ]
    )


def answer(tokenizer: Any, target: float, decimals: int = 2) -> JudgedAnswer:
    candidates = Candidates.of(tokenizer, "<conf>", decimals)
    return JudgedAnswer("a", (7, 8, 9, *candidates.opening), target, candidates)


@pytest.mark.parametrize(
    ("tokenizer", "decimals", "sequences"), [(DIGITS, 2, 11), (DIGITS, 1, 2), (None, 2, 2)]
)
def test_every_confidence_has_the_probability_of_its_text(
    tokenizer: Any, decimals: int, sequences: int
) -> None:
    tokenizer = tokenizer or with_numbers()
    one = answer(tokenizer, 0.0, decimals)
    samples = one.samples()
    assert len(samples) == sequences
    found = one.probabilities([scored(sample) for sample in samples])
    opening = len(one.candidates.opening)
    assert len(found) == 10**decimals + 1
    for place, probability in enumerate(found):
        text = f"{place / 10**decimals:.{decimals}f}"
        path = tokenizer.encode(f"<conf> Confidence: {text}", add_special_tokens=False)
        ids = list(one.token_ids)
        assert path[:opening] == list(one.candidates.opening)
        logprob = 0.0
        for token in path[opening:]:
            logprob += float(logits(tuple(ids))[token])
            ids.append(token)
        assert probability == pytest.approx(np.exp(logprob), rel=1e-9), text
    assert 0 < found.sum() < 1


@pytest.mark.parametrize("target", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_the_expected_brier_score(target: float, packing: bool) -> None:
    """Of a step of two answers, whatever the micro-batches; its gradient too."""
    answers = [answer(DIGITS, target), answer(DIGITS, 1.0 - target)]
    answers[1] = dataclasses.replace(answers[1], token_ids=(5, *answers[1].token_ids))
    samples = samples_of(answers)
    splits = [[0, 5, 13, 2], [index for index in range(22) if index not in (0, 2, 5, 13)]]
    total = 0.0
    gradient = {}
    for split, batch in zip(splits, collate(samples, splits, packing=packing), strict=True):
        rows = np.concatenate([scored(samples[index]) for index in split])
        flat = batch.tokens.flatten()[batch.rows]
        places = [
            samples[index].input_ids[place] for index in split for place in samples[index].places
        ]
        assert flat.tolist() == places, "a token is scored at its place"
        logprobs = torch.tensor(rows, requires_grad=True)
        outputs = TokenOutputs(logprobs=logprobs, entropy=torch.zeros(len(rows)))
        contributions, _ = expected_brier(batch, outputs)
        contributions.sum().backward()
        total += contributions.sum().item()
        assert logprobs.grad is not None
        parts = logprobs.grad.split([len(samples[i].response_ids) for i in split])
        gradient.update(zip(split, parts, strict=True))
    expected = 0.0
    for one in answers:
        probabilities = one.probabilities([scored(sample) for sample in one.samples()])
        brier = probabilities @ (CONFIDENCES - one.target) ** 2 + 1 - probabilities.sum()
        assert one.loss([scored(s) for s in one.samples()]) == pytest.approx(brier)
        expected += brier / 2
    assert total == pytest.approx(expected, rel=1e-6)
    # the derivative by the log-prob of a last token: -pi(c) (1 - (c - T)^2) / 2
    branch = answers[0].candidates.branches[3]
    probabilities = answers[0].probabilities([scored(sample) for sample in answers[0].samples()])
    places = list(branch.places)
    scores = 1 - (CONFIDENCES[places] - target) ** 2
    by_hand = -probabilities[places] * scores / 2
    np.testing.assert_allclose(gradient[3][len(branch.before) :].numpy(), by_hand, rtol=1e-5)


def test_a_branch_is_as_long_as_its_input() -> None:
    one = answer(DIGITS, 1.0)
    for sample in one.samples():
        assert sequence_length(sample) == len(sample.input_ids) <= one.length
        assert sample.places.max() == len(sample.input_ids) - 1


@pytest.mark.parametrize(
    ("target", "text"), [(0.0, "0.00"), (1.0, "1.00"), (0.834, "0.83"), (0.996, "1.00")]
)
@pytest.mark.parametrize("tokenizer", [DIGITS, None])
def test_a_text_answer_is_the_nearest_number(tokenizer: Any, target: float, text: str) -> None:
    tokenizer = tokenizer or with_numbers()
    one = TextAnswer(answer(tokenizer, target))
    (sample,) = one.samples()
    whole = [*one.answer.candidates.opening, *sample.response_ids.tolist()]
    assert whole == tokenizer.encode(f"<conf> Confidence: {text}", add_special_tokens=False)
    row = scored(sample)
    number = round(float(text) * 100)
    rows = [scored(each) for each in one.answer.samples()]
    assert one.loss([row]) == pytest.approx(-np.log(one.answer.probabilities(rows)[number]))


def test_the_loss_of_a_text_answer_is_the_cross_entropy_of_its_number() -> None:
    answers = [TextAnswer(answer(DIGITS, target)) for target in (0.0, 0.83)]
    samples = samples_of(answers)
    (batch,) = collate(samples, [[0, 1]], packing=False)
    rows = [scored(sample) for sample in samples]
    outputs = TokenOutputs(torch.tensor(np.concatenate(rows)), torch.zeros(sum(map(len, rows))))
    contributions, _ = cross_entropy(batch, outputs)
    expected = np.mean([one.loss([row]) for one, row in zip(answers, rows, strict=True)])
    assert float(contributions.sum()) == pytest.approx(expected)


def test_text_answers_of_one_number_and_other_targets_differ() -> None:
    digests = {TextAnswer(answer(DIGITS, target)).digest() for target in (0.831, 0.829, 0.831)}
    assert len(digests) == 2
    assert TextAnswer(answer(DIGITS, 1.0)).digest() != answer(DIGITS, 1.0).digest()


def test_the_digest_sees_the_target() -> None:
    digests = {answer(DIGITS, target).digest() for target in (0.0, 1.0, 0.0)}
    assert len(digests) == 2


def test_a_reading_is_the_mean_and_the_mode() -> None:
    probabilities = np.zeros(101)
    probabilities[[20, 80]] = (0.1, 0.3)
    reading = reading_of(probabilities, CONFIDENCES)
    assert reading is not None
    assert reading.mean == pytest.approx(0.65)
    assert (reading.greedy, reading.mass) == (0.8, pytest.approx(0.4))
    assert reading_of(np.zeros(101), CONFIDENCES) is None
