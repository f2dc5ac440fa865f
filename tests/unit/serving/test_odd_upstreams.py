"""Whatever JSON an upstream or a client sends, in whatever shape: nothing raises, and the client
gets JSON.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcpo.serving.asking import PATHS, Asked, ask
from megatron_dcpo.serving.calibrator import Calibrator
from megatron_dcpo.serving.whole_reply import Scoring, scored_reply
from tests.helpers.serving import FITTED_ON, halving, logistic, scorer_with
from tests.helpers.streaming import read_events, scored_stream, scoring_with

NAMES = (
    *("choices", "index", "delta", "message", "text", "content", "logprobs", "tokens"),
    *("token_logprobs", "top_logprobs", "logprob", "bytes", "finish_reason", "token"),
    *("id", "reasoning", "reasoning_content", "error", "usage"),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=True)
    | st.sampled_from(("stop", "<conf> 0.5", "\\boxed{1}", "\ud800", "", "é", "length"))
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=12,
)
ROW = st.fixed_dictionaries(
    {}, optional={"token": LEAVES, "logprob": LEAVES, "bytes": JSON, "top_logprobs": JSON}
)
LISTS = JSON | st.lists(LEAVES, max_size=3) | st.lists(ROW, max_size=3)
LOGGED = st.fixed_dictionaries(
    {},
    optional={
        "content": LISTS,
        "tokens": LISTS,
        "token_logprobs": LISTS,
        "top_logprobs": LISTS | st.lists(st.dictionaries(st.just("t"), LEAVES), max_size=3),
    },
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"content": LEAVES | JSON, "reasoning_content": LEAVES}
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": LEAVES,
        "logprobs": LOGGED | JSON,
        "message": MESSAGE | JSON,
        "delta": MESSAGE | JSON,
        "text": LEAVES | JSON,
        "finish_reason": LEAVES | JSON,
    },
)
CHOICES = st.fixed_dictionaries({"choices": st.lists(CHOICE | LEAVES, max_size=3)})
REPLY = CHOICES | JSON
SCORER = scorer_with(logistic(None))


def asked(api: Any, shows: bool = False, adds: bool = True) -> Asked:
    return Asked(api, {}, {}, shows_logprobs=shows, adds_logprobs=adds, shown_tops=1)


def scoring(one: Asked) -> Scoring:
    return scoring_with(SCORER, one)


@pytest.mark.parametrize("api", ["chat", "completions"])
@given(reply=REPLY, shows=st.booleans())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_reply_and_any_stream(api: str, reply: Any, shows: bool) -> None:
    one = asked(api, shows)
    content = json.dumps(reply).encode()
    json.loads(scored_reply(content, scoring(one)))
    event = b"data: " + content + b"\n\n"
    halves = [event[: len(event) // 2], event[len(event) // 2 :]]
    out = scored_stream(halves, scoring(one))
    assert out.endswith(b"\n\n")
    for found in read_events(out):
        assert found.data == "[DONE]" or json.loads(found.data) is not ...


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize(
    "logged",
    [
        {"content": 5},
        {"content": True},
        {"content": "abc"},
        {"content": {"a": 1}},
        {"content": [{"top_logprobs": 5}]},
        {"content": [{"top_logprobs": [1, 2]}]},
        {"content": [{"logprob": "x"}]},
        {"tokens": 1, "top_logprobs": 3},
        {"tokens": ["a"], "token_logprobs": ["x"]},
        {"top_logprobs": [1]},
        {"top_logprobs": [{"a": None, "b": 1}]},
    ],
)
def test_log_probs_of_another_form(api: str, shows: bool, logged: Any) -> None:
    choice = {
        "index": 0,
        "logprobs": logged,
        "message": {"content": "a"},
        "delta": {"content": "a"},
        "text": "a",
        "finish_reason": "stop",
    }
    content = json.dumps({"choices": [choice]}).encode()
    one = scoring(asked(api, shows))
    whole = json.loads(scored_reply(content, one))
    event = scored_stream([b"data: " + content + b"\n\n"], one)
    for found in (whole, json.loads(event[6:])):
        assert found["choices"][0]["confidence"] is None
        assert found["choices"][0]["confidence_reason"]


@given(body=st.dictionaries(st.sampled_from((*NAMES, "model", "prompt", "messages")), JSON))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_request(body: dict[str, Any]) -> None:
    for api in PATHS.values():
        for predictor in (halving(), logistic()):
            one = ask(body, api, Calibrator(predictor, FITTED_ON), {})
            assert one.body == body
            json.dumps(dict(one.sent))
