"""The form of a statement: its lead, the digits it chooses among, and where it begins."""

import numpy as np
import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.statement import StatementForm, reasoning_features, reasoning_length
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.objectives.expected_digits import DigitVocabulary
from megatron_dcpo.rollout import load_tokenizer
from tests.helpers.paths import REPOSITORY

QUICKSTART = REPOSITORY / "examples" / "quickstart" / "policy"


class Characters:
    """A tokenizer of single bytes."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


def form_of(two_digits):
    table = [bytes([byte]) for byte in range(256)] + [b"%02d" % n for n in range(100)] * two_digits
    return StatementForm.of(Characters(), DigitVocabulary.of(table, ()).token_ids, "<conf>"), table


def test_every_statement_is_a_valid_confidence():
    for two_digits in (False, True):
        form, table = form_of(two_digits)
        assert form.branches == (0 if two_digits else 10)
        for value in range(100):
            chosen = [form.digits[value]] if two_digits else form.digits[list(divmod(value, 10))]
            text = b"".join(table[i] for i in (*form.lead, *chosen)).decode()
            parsed = parse_confidence(text, marker="<conf>", finished=True, opener="\\boxed{")
            assert (parsed.status, parsed.confidence) == ("ok", value / 100)


def test_branches_stand_side_by_side_and_see_the_lead_and_themselves():
    form, _ = form_of(False)
    lead = len(form.lead)
    assert form.depths.tolist() == [*range(lead), *[lead] * 10]
    np.testing.assert_array_equal(form.sees[:lead, :lead], np.tril(np.ones((lead, lead))))
    np.testing.assert_array_equal(form.sees[lead:], np.hstack([np.ones((10, lead)), np.eye(10)]))
    assert form.tokens[form.choosing].tolist() == [ord("."), *b"0123456789"]


def test_a_tokenizer_without_digits_is_refused_in_one_line():
    with pytest.raises(UserError, match="no token for every digit"):
        StatementForm.of(Characters(), DigitVocabulary.of([b"a", b"1"], ()).token_ids, "<conf>")


def test_the_reasoning_ends_before_marker_white_space_and_end_token():
    tokenizer = load_tokenizer(QUICKSTART)
    tokens, eos = token_bytes(tokenizer), tokenizer.eos_token_id
    body = tokenizer.encode("61 \\boxed{16}", add_special_tokens=False)
    marked = tokenizer.encode("61 \\boxed{16}\n<conf> Confidence: 0.83", add_special_tokens=False)
    length = len(body)
    for ids, boundary in (([*marked, eos], length + 1), ([*body, eos], length), (body, length)):
        assert reasoning_length(np.array(ids), boundary, tokens.__getitem__, {eos}) == length


def test_features_are_finite_whatever_the_log_probs():
    for logprobs in ([], [0.0, 0.0], [-1e-7, -1e4], [1e-6]):
        features = reasoning_features(np.array(logprobs, np.float32))
        assert features.dtype == np.float32
        assert np.isfinite(features).all()
    np.testing.assert_allclose(
        reasoning_features(np.log(np.array([0.5, 0.25]))),
        [0.125, 0.25, np.log1p(np.log(8)), np.log1p(np.log(4))],
        rtol=1e-6,
    )
