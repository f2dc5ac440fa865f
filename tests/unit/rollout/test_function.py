"""A user's rollout: turns become one response, and what cannot be trained on is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.rollout.function import (
    RolloutContext,
    Transcript,
    checked_stream,
    load_rollout_function,
)
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Prompt, Response

PROMPT = Prompt("p", (), (1, 2), "", "t")
SAMPLES = [(PROMPT, 0), (PROMPT, 1)]
VOCABULARY = 20


def turn(prompt_id: str, *tokens: int, index: int = 0, **fields: Any) -> Response:
    ids = np.array(tokens, np.int64)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Response(prompt_id, index, ids, logprobs, "stop", 3, **fields)


def context(max_tokens: int = 8) -> RolloutContext:
    engine: Any = SimpleNamespace(eos_token_ids=(9,))
    tokenizer: Any = None
    return RolloutContext(engine, tokenizer, SamplingConfig(max_tokens=max_tokens), step=1)


def test_turns_become_one_response() -> None:
    """Tokens in order; log-probs and mask say which the policy sampled."""
    transcript = Transcript(PROMPT, 1).sampled(turn("p", 5, 6, 7), tokens=2).written([8, 8])
    second = transcript.next_prompt()
    assert second.token_ids == (1, 2, 5, 6, 8, 8)
    assert second.prompt_id != PROMPT.prompt_id, "the second turn has random numbers of its own"
    other = Transcript(PROMPT, 0).sampled(turn("p", 5)).next_prompt()
    assert other.prompt_id != second.prompt_id, "equal ids are equal prompts to engines"
    response = transcript.sampled(turn(second.prompt_id, 4, 9, index=1)).response()
    assert response.key == ("p", 1)
    assert response.token_ids.tolist() == [5, 6, 8, 8, 4, 9]
    assert response.logprobs.tolist() == [-1, -2, 0, 0, -1, -2]
    assert response.loss_mask is not None
    assert response.loss_mask.tolist() == [True, True, False, False, True, True]
    assert (response.finish_reason, response.weights_version) == ("stop", 3)
    third = transcript.sampled(turn(second.prompt_id, 4)).next_prompt()
    assert third.prompt_id not in (PROMPT.prompt_id, second.prompt_id)


def test_the_last_turn_is_the_policys() -> None:
    for transcript in (Transcript(PROMPT, 0), Transcript(PROMPT, 0).written([1])):
        with pytest.raises(ValueError, match="last turn"):
            transcript.response()


def yielding(*lists: list[Any]) -> Callable[[Any, Any], Iterator[list[Any]]]:
    def rollout(samples: Any, context: Any) -> Iterator[list[Any]]:
        yield from lists

    return rollout


GOOD = turn("p", 5, 6)
MASK = np.array([True, False])


def test_good_responses_pass_in_their_order() -> None:
    both = [[turn("p", 5, index=1)], [turn("p", 5, 6, loss_mask=MASK)]]
    stream = checked_stream(yielding(*both), "f.py:rollout", SAMPLES, context(), VOCABULARY)
    assert [one[0].sample_index for one in stream] == [1, 0]


@pytest.mark.parametrize(
    "lists",
    [
        [["text"]],
        [[GOOD], [GOOD]],
        [[turn("other", 5)]],
        [[turn("p")]],
        [[turn("p", *range(9))]],
        [[Response("p", 0, np.arange(2), np.zeros(3, np.float32), "stop", 3)]],
        [[turn("p", 5, 6, loss_mask=np.array([1, 0]))]],
        [[turn("p", 5, 6, loss_mask=np.array([True]))]],
        [[turn("p", 5, 6, loss_mask=np.array([False, False]))]],
        [[turn("p", 5, VOCABULARY)]],
        [[turn("p", 5, -1)]],
        [[replace(GOOD, token_ids=[5, 6])]],
        [[replace(GOOD, token_ids=np.array([5.0, 6.0]))]],
        [[replace(GOOD, token_ids=np.array([[5, 6]]))]],
        [[replace(GOOD, logprobs=[-1.0, -2.0])]],
        [[replace(GOOD, logprobs=np.array([-1, np.nan], np.float32))]],
        [[replace(GOOD, logprobs=np.array([-1, -np.inf], np.float32))]],
        [[replace(GOOD, logprobs=np.array([-1, 0.5], np.float32))]],
        [[replace(GOOD, finish_reason="done")]],
        [[GOOD]],  # one is missing
        [3],  # no list
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_the_option(lists: list[Any]) -> None:
    with pytest.raises(UserError, match=r"rollout\.function=f\.py:rollout"):
        list(checked_stream(yielding(*lists), "f.py:rollout", SAMPLES, context(), VOCABULARY))


def test_a_function_that_fails_is_one_line() -> None:
    def rollout(samples: Any, context: Any) -> Iterator[list[Response]]:
        yield [GOOD]
        raise ZeroDivisionError("the tool\nfailed")

    with pytest.raises(UserError, match="ZeroDivisionError") as refused:
        list(checked_stream(rollout, "f.py:rollout", SAMPLES, context(), VOCABULARY))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ends", [SystemExit(0), SystemExit(3), SystemExit("enough")])
def test_a_function_does_not_end_the_process(ends: BaseException) -> None:
    def rollout(samples: Any, context: Any) -> Iterator[list[Response]]:
        yield [GOOD]
        raise ends

    with pytest.raises(UserError, match="SystemExit"):
        list(checked_stream(rollout, "f.py:rollout", SAMPLES, context(), VOCABULARY))


def test_log_probs_of_written_tokens_are_not_read() -> None:
    logprobs = np.array([-1, np.nan], np.float32)
    written = replace(GOOD, loss_mask=MASK, logprobs=logprobs)
    both = [[written], [turn("p", 5, index=1)]]
    stream = checked_stream(yielding(*both), "f.py:rollout", SAMPLES, context(), VOCABULARY)
    assert len(list(stream)) == 2


def test_an_engine_that_fails_is_no_fault_of_the_function() -> None:
    def rollout(samples: Any, context: Any) -> Iterator[list[Response]]:
        raise EngineError("killed")
        yield

    with pytest.raises(EngineError):
        list(checked_stream(rollout, "f.py:rollout", SAMPLES, context(), VOCABULARY))


def test_a_function_of_other_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def rollout(samples):\n    yield []\n")
    with pytest.raises(UserError, match=r"rollout\.function"):
        load_rollout_function(f"{tmp_path / 'f.py'}:rollout")
