"""Streams of an upstream as bytes, in any form that servers write them, and what a client reads out
of one.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2

from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.bounds import Bounds
from megatron_dcpo.serving.scorer import Scored, Scorer
from megatron_dcpo.serving.stream import Stream
from megatron_dcpo.serving.whole_reply import Scoring, scored_reply

# of the confidence
FIELDS = (
    *("confidence", "confidence_raw", "confidence_source"),
    *("confidence_reason", "confidence_abstains"),
)


def scoring_with(scorer: Scorer, asked: Asked, **bounds: Any) -> Scoring:
    def count(scored: Scored) -> None:
        """Nobody counts."""

    return Scoring(asked, scorer, count, Bounds(**bounds))


def scored_whole(reply: Any, scoring: Scoring) -> Any:
    """A reply that is not streamed, as the client gets it."""
    return json.loads(scored_reply(json.dumps(reply).encode(), scoring))


def scored_stream(pieces: list[bytes], scoring: Scoring) -> bytes:
    """A stream that ends after these pieces, as the client gets it."""

    async def all_of_them() -> bytes:
        stream = Stream(scoring)
        out = [await stream.feed(piece) for piece in pieces]
        return b"".join([*out, await stream.end()])

    return asyncio.run(all_of_them())


def read_events(content: bytes) -> list[httpx2.ServerSentEvent]:
    """The events that another decoder finds."""
    request = httpx2.Request("GET", "http://here")
    headers = {"content-type": "text/event-stream"}
    reply = httpx2.Response(200, headers=headers, content=content, request=request)
    return list(httpx2.EventSource(reply, max_event_size=None))


def read_choices(content: bytes) -> dict[int, dict[str, Any]]:
    """By index, the joined text and thinking of a stream, its last chunk, and how many chunks have
    a confidence.
    """
    found: dict[int, dict[str, Any]] = {}
    for event in read_events(content):
        chunk = None if event.data == "[DONE]" else json.loads(event.data)
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        for choice in choices if isinstance(choices, list) else ():
            one = found.setdefault(choice.get("index", 0), {"text": "", "scored": 0})
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            one["text"] += text if isinstance(text, str) else ""
            one["scored"] += "confidence" in choice
            one["last"] = choice
    return found
