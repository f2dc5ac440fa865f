"""Training on all digits of a confidence at once: which tokens they are, what each choice is worth, the gradient."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.blocks import split_blocks
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.objectives import ObjectiveConfig, build_objective, resolve
from megatron_dcpo.objectives.advantages import MIN_BATCH_RMS, SCORES
from megatron_dcpo.objectives.expected_digits import (
    DecimalToken,
    DigitBatch,
    DigitVocabulary,
    digit_losses,
    score_choices,
)
from megatron_dcpo.types import Judgement
from tests.helpers.objective_cases import OLD, golden_judgements, judgement, token_batch
from tests.helpers.tokenizers import byte_level, qwen, table_of

OPTIONS = ObjectiveConfig(preset="dcpo_proper")


def decimals(text, tokens, ids, eos=999):
    split = split_blocks([*ids, eos], tokens, [eos], "<conf>")
    assert split.content == text.encode()
    judged = Judgement("p", 1.0, 0.5, "ok", split.boundary, len(ids) + 1)
    return DigitVocabulary.of(tokens.table, [eos]).decimals([*ids, eos], judged)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ("0.83", [(0, 0), (8, 1), (3, 2)]),
        ("0.8", [(0, 0), (8, 1)]),
        (".75", [(7, 1), (5, 2)]),
        ("0.905\n ", [(0, 0), (9, 1), (0, 2), (5, 3)]),
        ("00.5", [(5, 1)]),
        ("0.00", [(0, 0), (0, 1), (0, 2)]),
        ("1.00", [(1, 0)]),
        ("1", [(1, 0)]),
        ("0", [(0, 0)]),
        ("1.", [(1, 0)]),
    ],
)
def test_decimals_of_a_token_per_byte(number, expected):
    text = f"\\boxed{{5}} 0.12\n<conf> Confidence: {number}"
    tokens = table_of(byte_level)
    ids = [tokens.table.index(bytes([byte])) for byte in text.encode()]
    found = decimals(text, tokens, ids)
    assert [(d.value, d.place) for d in found] == expected
    assert all(d.width == 1 and tokens[ids[d.position]] == str(d.value).encode() for d in found)


def test_decimals_in_tokens_of_several_digits():
    pieces = [b"x ", b"<conf>", b" ", b"0", b".", b"83", b"075", b".4", b"2", b"0.", b"1234", b" 0"]
    tokens = TokenBytes(tuple(pieces))

    def found(*ids):
        return decimals(b"".join(pieces[i] for i in ids).decode(), tokens, ids)

    zero = DecimalToken(3, 0, 1, 0)
    assert found(0, 1, 2, 3, 4, 5) == (zero, DecimalToken(5, 83, 2, 2))
    assert found(0, 1, 2, 9, 6, 5) == (DecimalToken(4, 75, 3, 3), DecimalToken(5, 83, 2, 5))
    assert found(0, 1, 2, 3, 7, 8) == (zero, DecimalToken(5, 2, 1, 2)), "a token with the point in it is left alone"
    assert found(0, 1, 11, 4, 5) == (DecimalToken(4, 83, 2, 2),)
    assert found(0, 1, 2, 9, 10) == (), "wider than any table"


def test_qwen_has_every_digit_as_a_token():
    tokenizer, tokens = qwen(), table_of(qwen)
    text = "\\boxed{5}\n<conf> Confidence: 0.83"
    ids = tokenizer.encode(text).ids
    found = decimals(text, tokens, ids, eos=len(tokens.table) + 5)
    assert [(d.value, d.width, d.place) for d in found] == [(0, 1, 0), (8, 1, 1), (3, 1, 2)]
    tables = DigitVocabulary.of(tokens.table, []).token_ids
    assert [tokens[int(i)] for i in tables[1]] == [str(d).encode() for d in range(10)]
    assert ids[found[1].position] == tables[1][8]


def test_the_table_of_digits_knows_what_the_vocabulary_lacks():
    tables = DigitVocabulary.of((b"0", b"07", b"a", b"1", b"99", b"1234"), []).token_ids
    assert tables[1].tolist() == [0, 3, *[-1] * 8]
    assert tables[2][7] == 1
    assert tables[2][99] == 4
    assert (tables[2] >= 0).sum() == 2
    assert len(tables[3]) == 1000
    assert (tables[3] < 0).all()


def stated(correct, confidence, boundary=3):
    digits = round(confidence * 100)
    tokens = DecimalToken(boundary, digits // 10, 1, 1), DecimalToken(boundary + 1, digits % 10, 1, 2)
    return judgement("p", correct, confidence, boundary), tokens


def score(options, stated_confidences):
    judgements, decimals = zip(*stated_confidences, strict=True)
    return build_objective(options).score(judgements, decimals=decimals)


def test_every_choice_is_scored_against_the_target():
    judged = [stated(1, 0.83), stated(0, 0.12)]
    scored = score(OPTIONS.changed(advantage_normalization_confidence="mean"), judged)
    first, second = scored.digits[0]
    assert (first.position, second.position) == (3, 4)
    np.testing.assert_allclose(first.scores, [-((d / 10 + 0.03 - 1) ** 2) for d in range(10)])
    np.testing.assert_allclose(second.scores, [-((0.8 + d / 100 - 1) ** 2) for d in range(10)])
    np.testing.assert_allclose(scored.digits[1][0].scores, [-((d / 10 + 0.02) ** 2) for d in range(10)])


def test_before_the_point_one_is_a_choice():
    """`0` is the confidence as it was stated, or the nearest below where 1 was; nothing but `0` and `1` is a choice."""
    judged = [stated(R, 0.83) for R in (1, 0)] + [(judgement("p", R, 1.0, 3), ()) for R in (1, 0)]
    before = [(DecimalToken(3, 0, 1, 0),)] * 2 + [(DecimalToken(3, 1, 1, 0),)] * 2
    judged = [(one, token) for (one, _), token in zip(judged, before, strict=True)]
    scored = score(OPTIONS.changed(advantage_normalization_confidence="mean"), judged)
    expected = [[-(0.17**2), 0], [-(0.83**2), -1], [-(0.01**2), 0], [-(0.99**2), -1]]
    np.testing.assert_allclose([digits[0].scores for digits in scored.digits], expected, atol=1e-15)
    _, ids, _ = DigitVocabulary({1: np.arange(20, 30)}, lambda _: b"", ()).candidates([(0, scored.digits[0][0])])
    assert ids.tolist() == [[20, 21, *[-1] * 8]]


@pytest.mark.parametrize("p", [0.6, 0.9, 0.98, 0.9999])
def test_a_confidence_of_one_is_left_where_less_is_better(p):
    """Whoever always says 1.00 has no mate to compare with: the sampled gradient is 0, and this one is not, in expectation
    over labels: it leaves 1 where 0.99 has the higher expected score."""
    token = DecimalToken(3, 1, 1, 0)
    expected = sum(q * score_choices(1.0, token, t, resolve(OPTIONS)) for q, t in ((p, 1.0), (1 - p, 0.0)))
    z = torch.zeros(1, 2, requires_grad=True)
    digit_losses(
        DigitBatch(torch.arange(1), torch.log_softmax(z, -1), torch.tensor(expected)[None]), OPTIONS
    ).backward()
    assert (z.grad[0, 1] > 0) == (p < 0.995), "a positive gradient of the loss: less of `1`"


def test_each_place_has_a_scale_of_its_own():
    """The root mean square of the centred scores over the mini-batch and all choices; hundredths count like tenths."""
    judged = [stated(1, 0.83), stated(0, 0.92), stated(1, 0.97)]
    unscaled = score(OPTIONS.changed(advantage_normalization_confidence="mean"), judged)
    scored = score(OPTIONS, judged)
    for place in (0, 1):
        raw = np.array([digits[place].scores for digits in unscaled.digits])
        rms = np.sqrt(np.mean((raw - raw.mean(axis=1, keepdims=True)) ** 2))
        assert rms > MIN_BATCH_RMS
        np.testing.assert_allclose([digits[place].scores for digits in scored.digits], raw / rms)


def test_a_place_where_nothing_is_at_stake_is_not_blown_up():
    judged = [stated(1, 0.97), stated(1, 0.98)]
    scored = score(OPTIONS, judged)
    expected = [-((0.9 + d / 100 - 1) ** 2) / MIN_BATCH_RMS for d in range(10)]
    np.testing.assert_allclose(scored.digits[0][1].scores, expected)


def test_other_settings_train_on_the_sampled_digit_alone():
    judged = [stated(1, 0.83), stated(0, 0.12)]
    for options in (ObjectiveConfig(), ObjectiveConfig(name="grpo"), ObjectiveConfig(name="rlcr")):
        assert score(options, judged).digits == ((), ())


def test_a_groups_own_std_is_refused():
    message = r"advantage_normalization_confidence to batch_std, mean or none, or confidence_gradient to sampled"
    with pytest.raises(UserError, match=message):
        build_objective(OPTIONS.changed(advantage_normalization_confidence="std"))


def gradient(logits, scores, damping, known=None):
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(z, -1)
    if known is not None:
        logp = logp.masked_fill(~known, -torch.inf)
    options = resolve(OPTIONS.changed(digit_damping=damping))
    digit_losses(DigitBatch(torch.arange(len(logits)), logp, torch.tensor(scores)), options).sum().backward()
    return z.grad.numpy()


def test_much_damping_leaves_the_direction_of_the_expected_score():
    rng = np.random.default_rng(0)
    logits, scores = rng.normal(size=(3, 10)), rng.normal(size=(3, 10))
    z = torch.tensor(logits, requires_grad=True)
    (-(torch.softmax(z, -1) * torch.tensor(scores)).sum()).backward()
    np.testing.assert_allclose(gradient(logits, scores, 1e9), z.grad.numpy(), atol=1e-6)


def test_no_damping_is_the_natural_gradient():
    rng = np.random.default_rng(1)
    logits, scores = rng.normal(size=(3, 10)), rng.normal(size=(3, 10))
    expected = -(scores - scores.mean(-1, keepdims=True)) / 10
    np.testing.assert_allclose(gradient(logits, scores, 0.0), expected, atol=1e-12)


@pytest.mark.parametrize("sharpness", [0.1, 3.0, 20.0])
def test_in_between_it_is_the_damped_natural_gradient_over_W(sharpness):
    """-(F + lambda I)^-1 g / W with the Fisher matrix F = diag(pi) - pi pi^T of the softmax, g the gradient of the expected
    score and W = sum_d pi_d / (pi_d + lambda): exactly, by Sherman and Morrison."""
    rng = np.random.default_rng(2)
    logits, scores = rng.normal(0, sharpness, size=(1, 10)), rng.normal(size=(1, 10))
    pi = (np.exp(logits) / np.exp(logits).sum())[0]
    F, g = np.diag(pi) - np.outer(pi, pi), pi * (scores[0] - pi @ scores[0])
    W = (pi / (pi + 0.001)).sum()
    expected = -np.linalg.solve(F + 0.001 * np.eye(10), g) / W
    np.testing.assert_allclose(gradient(logits, scores, 0.01)[0], expected, atol=1e-12)


def first_digit(damping: float | None, p: float, start: list[float], *, steps: int, lr: float) -> np.ndarray:
    """Return how often each first digit of ``0.d5`` is stated along training, [steps + 1, 10], from ``start`` [10] on.

    Exact: the expectation over labels Bernoulli(p) of the step that ``confidence_gradient: digits`` takes with Brier and
    ``batch_std``, on the logits of a softmax. ``damping`` None: the expected step of the sampled digit's gradient.
    """
    options = resolve(ObjectiveConfig(digit_damping=1e9 if damping is None else damping))
    levels = np.arange(10) / 10 + 0.05
    scores = SCORES["brier"](levels, np.array([[1.0], [0.0]]), 0.0)  # [label, digit]
    chance = np.array([[p], [1 - p]])
    z = torch.tensor(np.log(start), dtype=torch.float64)
    path = [torch.softmax(z, -1).numpy()]
    for _ in range(steps):
        said = path[-1] if damping is None else np.full(10, 0.1)  # A_c's scale is of what was said, the place's of all
        rms = np.sqrt((chance * said * np.square(scores - scores @ said[:, None])).sum())
        expected = torch.from_numpy((chance * scores).sum(0) / max(rms, MIN_BATCH_RMS))
        z.requires_grad_()
        rows = DigitBatch(torch.zeros(1, dtype=torch.int64), torch.log_softmax(z, -1)[None], expected[None])
        (gradient,) = torch.autograd.grad(digit_losses(rows, options).sum(), z)
        z = z.detach() - lr * gradient
        path.append(torch.softmax(z, -1).numpy())
    return np.array(path)


def test_the_default_damping_keeps_digits_that_are_hardly_ever_said():
    """A first digit 0 that the policy says 5 times in 10,000, where 0.05 is about right: a damping of 0.01 gives it up, as
    its weight vanishes below the probability 0.01 / 10."""
    start = [5e-4, *[(1 - 5e-4) / 9] * 9]
    said = {
        damping: first_digit(damping, 0.037, start, steps=1000, lr=1.0)[-1] @ (np.arange(10) / 10 + 0.05)
        for damping in (resolve(OPTIONS).digit_damping, 0.01)
    }
    assert said[0.001] == pytest.approx(0.05, abs=0.005)
    assert said[0.01] == pytest.approx(0.15, abs=0.001)


def test_a_rare_digit_is_found_that_the_sampled_gradient_gives_up():
    """First digits as the lab's starting policy says them of its hardest problems, right in 3.5 % of the cases."""
    start = [0.002, 0.007, 0.024, 0.057, 0.073, 0.115, 0.16, 0.182, 0.153, 0.227]
    damped, sampled = (first_digit(damping, 0.035, start, steps=1000, lr=1.0)[-1] for damping in (0.01, None))
    assert damped[0] > 0.95
    assert sampled[0] < 0.001
    assert sampled @ np.arange(10) > 2, "it stays above 0.2"


def test_a_choice_the_vocabulary_lacks_takes_no_part():
    known = torch.tensor([[True, True, False, True]])
    logits, scores = np.zeros((1, 4)), np.array([[0.0, -1.0, -5.0, -2.0]])
    for damping in (0.0, 0.01, 1.0):
        found = gradient(logits, scores, damping, known)
        assert np.isfinite(found).all()
        assert found[0, 2] == pytest.approx(0, abs=1e-12)


def test_a_digit_without_any_probability_leaves_the_loss_finite():
    logits = np.array([[0.0, -2000.0, -50.0]])
    for damping in (0.0, 0.01):
        assert np.isfinite(gradient(logits, np.array([[-1.0, 0.0, -0.5]]), damping)).all()


def test_the_loss_replaces_the_sampled_term_at_its_rows_only():
    chosen = build_objective(OPTIONS.changed(entropy_coef=0.0))
    scored = chosen.score(golden_judgements(), OLD)
    batch = token_batch(scored, chosen.token_weights(scored, chosen.counts(scored)))
    rows = torch.tensor([2, 7])
    digits = DigitBatch(rows, torch.log_softmax(torch.randn(2, 10, dtype=torch.float64), -1), torch.randn(2, 10))
    plain, _ = chosen.token_loss(batch)
    losses, _ = chosen.token_loss(dataclasses.replace(batch, digits=digits))
    expected = plain.clone()
    expected[rows] = digit_losses(digits, chosen.options).to(plain) * batch.weights[rows]
    torch.testing.assert_close(losses, expected)


def test_the_clip_fraction_leaves_these_rows_out():
    chosen = build_objective(OPTIONS.changed(clip_low=0.0, clip_high=0.0))
    scored = chosen.score(golden_judgements(), OLD)
    batch = token_batch(scored, chosen.token_weights(scored, chosen.counts(scored)))
    _, plain = chosen.token_loss(batch)
    rows = torch.arange(len(batch.logprobs))
    choices = torch.log_softmax(torch.zeros(len(rows), 10, dtype=torch.float64), -1)
    _, none = chosen.token_loss(dataclasses.replace(batch, digits=DigitBatch(rows, choices, choices)))
    assert sum(plain[f"clipped/{block}"] for block in ("reasoning", "confidence")) > 0
    assert none["clipped/reasoning"] == none["clipped/confidence"] == 0
