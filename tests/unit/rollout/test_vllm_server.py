"""The client of a vLLM server: what it accepts of a reply. A real server answers in
``tests/engine``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import server_link, vllm_server
from megatron_dcpo.rollout.engine import EngineError, SamplingConfig
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.types import Prompt
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import one_rank

HONEST: dict[str, Any] = {
    "/health": {},
    "/v1/models": {"data": [{"id": "m"}]},
    "/weight_info": {"weight_version": "0"},
    "/server_info?config_format=json": {"logprobs_mode": "processed_logprobs"},
}
CHOICE = {
    "token_ids": [1, 2],
    "logprobs": {"token_logprobs": [-0.5, -1.0]},
    "finish_reason": "stop",
}
PROMPT = Prompt("p", (), (1, 2), "5", "")


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    given = dict(HONEST) | {"/v1/completions": {"choices": [CHOICE]}}
    monkeypatch.setattr(JsonClient, "call", lambda self, path, body=None, **_: given[path])
    return given


def sample(tmp_path: Path) -> Any:
    engine = ServerEngine(["http://server"], QUICKSTART / "policy", tmp_path)
    (response,) = engine.generate([PROMPT], SamplingConfig(max_tokens=2))
    return response


def test_an_honest_reply_is_a_response(replies: dict[str, Any], tmp_path: Path) -> None:
    response = sample(tmp_path)
    assert (response.token_ids.tolist(), response.logprobs.tolist()) == ([1, 2], [-0.5, -1.0])
    assert response.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["length", "abort", "error", "repetition", None])
def test_any_other_reason_is_unfinished(
    replies: dict[str, Any], tmp_path: Path, reason: str | None
) -> None:
    replies["/v1/completions"] = {"choices": [CHOICE | {"finish_reason": reason}]}
    assert sample(tmp_path).finish_reason == "length"


@pytest.mark.parametrize(
    "odd",
    [
        {"token_ids": [1, 10**6]},
        {"token_ids": [-1, 2]},
        {"token_ids": [1, 10**30]},
        {"token_ids": [1]},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [-1, -1, -1]}},
        {"token_ids": "12"},
        {"token_ids": [[1, 2]], "logprobs": {"token_logprobs": [[-1, -1]]}},
        {"logprobs": {"token_logprobs": [-1, 5]}},
        {"logprobs": {"token_logprobs": [-1, float("nan")]}},
        {"logprobs": {"token_logprobs": [-1, None]}},
        {"logprobs": None},
        {"logprobs": {}},
    ],
)
def test_an_odd_reply_is_an_error_of_the_engine(
    replies: dict[str, Any], tmp_path: Path, odd: dict[str, Any]
) -> None:
    """No token outside the vocabulary reaches the policy, no other log-probs the loss."""
    replies["/v1/completions"] = {"choices": [CHOICE | odd]}
    with pytest.raises(EngineError, match="unexpected reply"):
        sample(tmp_path)


@pytest.mark.parametrize(
    "reply", [None, [], {}, {"choices": []}, {"choices": [CHOICE, CHOICE]}, {"choices": [1]}, "x"]
)
def test_a_reply_of_another_kind_as_well(
    replies: dict[str, Any], tmp_path: Path, reply: Any
) -> None:
    replies["/v1/completions"] = reply
    with pytest.raises(EngineError, match="unexpected reply"):
        sample(tmp_path)


@pytest.mark.parametrize(
    ("path", "reply"),
    [("/v1/models", []), ("/v1/models", {"data": [1]}), ("/v1/models", {"data": None})],
)
def test_a_server_that_names_no_model(
    replies: dict[str, Any], tmp_path: Path, path: str, reply: Any
) -> None:
    replies[path] = reply
    with pytest.raises(UserError, match=r"rollout\.endpoint"):
        sample(tmp_path)


@pytest.mark.parametrize("reply", [[], {}, {"weight_version": "1"}, {"weight_version": 0}, "0"])
def test_a_server_with_other_weights_is_refused(
    replies: dict[str, Any], tmp_path: Path, reply: Any
) -> None:
    replies["/weight_info"] = reply
    with pytest.raises(EngineError, match="holds weights version"):
        sample(tmp_path)


# ------------------------------------------------------------------- a server that starts


def failing(error: HttpError, times: int, replies: dict[str, Any]) -> Any:
    """Answers to ``/health``: ``error`` so many times, then the server is there."""
    left = [error] * times

    def call(self: JsonClient, path: str, body: Any = None, **_: Any) -> Any:
        if path == "/health" and left:
            raise left.pop()
        return replies.get(path, {})

    return call


@pytest.mark.parametrize(
    "error", [HttpError("refused", unreachable=True), HttpError("HTTP 503", status=503)]
)
def test_a_run_waits_for_a_server_that_starts(
    error: HttpError, replies: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(server_link.time, "sleep", pauses.append)
    monkeypatch.setattr(JsonClient, "call", failing(error, 3, replies))
    with one_rank():
        assert sample(tmp_path).finish_reason == "stop"
    assert len(pauses) == 3


def test_it_waits_for_a_limited_time(
    replies: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = HttpError("refused", unreachable=True)
    monkeypatch.setattr(server_link, "START_SECONDS", 0.0)
    monkeypatch.setattr(server_link.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(JsonClient, "call", failing(refused, 10**6, replies))
    with one_rank(), pytest.raises(UserError, match=r"rollout\.endpoint"):
        sample(tmp_path)


@pytest.mark.parametrize("asked", [None, "fp8_per_block", "fp8_per_tensor"])
@pytest.mark.parametrize("served", [None, "fp8_per_block", "fp8"])
def test_a_server_has_the_quantization_of_the_configuration(
    replies: dict[str, Any], tmp_path: Path, asked: str | None, served: str | None
) -> None:
    """As vLLM reports it; without one the policy would be sampled in another precision than the
    rules have seen.
    """
    replies["/server_info?config_format=json"] = {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs", "quantization": served}
        }
    }

    def start() -> ServerEngine:
        return ServerEngine(["http://server"], QUICKSTART / "policy", tmp_path, quantization=asked)

    if asked == served or (asked, served) == ("fp8_per_tensor", "fp8"):
        start()
        return
    with pytest.raises(UserError, match=r"rollout\.vllm\.quantization") as refused:
        start()
    assert (served or "unquantized") in str(refused.value)
    assert (f"--quantization {asked}" in str(refused.value)) == (asked is not None)


def test_a_cache_that_was_not_cleared_is_an_error(replies: dict[str, Any], tmp_path: Path) -> None:
    """vLLM answers with status 200 then too."""
    engine = ServerEngine(["http://server"], QUICKSTART / "policy", tmp_path)
    replies["/reset_prefix_cache"] = {"success": False}
    with pytest.raises(EngineError, match="prefix cache"):
        engine.server.adopt(1)
    replies["/reset_prefix_cache"] = {}
    replies["/update_weight_version"] = {}
    engine.server.adopt(1)


# ------------------------------------------------------------------- a request that takes long


@pytest.mark.parametrize("limit", [0.0, 60.0])
def test_a_response_that_takes_too_long_is_told_from_a_server_that_fails(
    replies: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    def call(self: JsonClient, path: str, body: Any = None, **_: Any) -> Any:
        if path == "/v1/completions":
            raise HttpError("the reply was not complete in time")
        return replies[path]

    monkeypatch.setattr(server_link, "REQUEST_SECONDS", limit)
    monkeypatch.setattr(JsonClient, "call", call)
    with pytest.raises((UserError, EngineError)) as caught:
        sample(tmp_path)
    assert isinstance(caught.value, UserError) == (limit == 0.0)
    assert ("--engines" in str(caught.value)) == (limit == 0.0)


def test_a_signal_withdraws_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rollout ends while its request would go on."""
    withdrawn = threading.Event()

    def call(self: JsonClient, path: str, body: Any = None, **options: Any) -> Any:
        if path != "/v1/completions":
            return HONEST[path]
        assert options["stop"].wait(60)
        withdrawn.set()
        raise HttpError("the request was withdrawn")

    monkeypatch.setattr(JsonClient, "call", call)
    looks = iter(range(10**6))
    monkeypatch.setattr(vllm_server, "stop_requested", lambda: next(looks) > 0)
    with pytest.raises(RolloutAbandoned):
        sample(tmp_path)
    assert withdrawn.is_set()
