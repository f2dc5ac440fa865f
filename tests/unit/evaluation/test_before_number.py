"""The tokens of an answer up to the number of its confidence."""

from __future__ import annotations

from transformers import AutoTokenizer

from megatron_dcpo.evaluation.before_number import BeforeNumber, RenderedAs, tokens_of_numbers
from megatron_dcpo.types import CONFIDENCE_TAG
from tests.helpers.evaluated import make_sample
from tests.helpers.paths import QUICKSTART


def test_a_tag_in_the_thinking_does_not_end_the_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "policy")
    opening, _ = tokens_of_numbers(tokenizer, CONFIDENCE_TAG, decimals=2)
    before_number = BeforeNumber(
        tokenizer=tokenizer,
        rendered_as=RenderedAs(marker=CONFIDENCE_TAG, template="raw", thinking="off"),
        opening=opening,
        most_tokens=1000,
    )
    thinking = f"12 {CONFIDENCE_TAG} 21 "
    sample = make_sample(
        problem="2*3=",
        asked=None,
        finish_reason="stop",
        text=f"{thinking}\\boxed{{6}}\n{CONFIDENCE_TAG} Confidence: 0.95",
        thinking_characters=len(thinking),
    )
    (ids,) = before_number.token_ids([sample])
    assert ids is not None
    read = tokenizer.decode(ids).replace(" ", "")
    assert read.endswith(f"{thinking}\\boxed{{6}}\n{CONFIDENCE_TAG}Confidence:".replace(" ", ""))
