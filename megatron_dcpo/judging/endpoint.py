"""A user's verifier on a server, to which responses are posted in batches as JSON
(docs/bring_your_own.md#a-reward-server).

The request is ``{"items": [{"response", "answer", "problem", "columns": {...}}, ...]}``, the reply
``{"results": [...]}`` with one result per item: a bool, a number in [0, 1], a mapping with such a
``score``, or ``{"error": why}``. No text of a reply that is kept or shown holds the key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import FREE, Attempt, Outcome
from megatron_dcpo.judging.verdicts import OPTION, outcome_of, warn_once
from megatron_dcpo.judging.verifier_kind import VerifierKind
from megatron_dcpo.runtime.http_json import HttpError, JsonClient

KEY = "DCPO_VERIFIER_KEY"  # environment variable of the key sent as a bearer token
BATCH = 64
ATTEMPTS = 4
MAX_REPLY_BYTES = 8 << 20


class EndpointVerifier:
    """The verifier (``judge.Verifier``) at ``url``. If it does not answer a batch within
    ``judging.program_seconds`` in any of ``ATTEMPTS`` tries, no response of the batch is judged.
    Raises :class:`UserError` if no server answers at the start.
    """

    def __init__(self, url: str, options: JudgingConfig) -> None:
        self.options = options
        self.warn = warn_once(url)
        try:
            self.client = JsonClient(
                url,
                os.environ.get(KEY) or None,
                timeout=options.program_seconds,
                attempts=ATTEMPTS,
                longest_pause=8.0,
                max_reply_bytes=MAX_REPLY_BYTES,
            )
            self._post([])
        except HttpError as error:
            raise UserError(
                f"{OPTION}={url}: {error}; start the server, or correct the address"
            ) from None

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome | None]:
        """Return the outcome of each reasoning block."""
        results: list[Any] = []
        for first in range(0, len(attempts), BATCH):
            batch = attempts[first : first + BATCH]
            try:
                results += self._post(batch)
            except HttpError as error:
                results += [{"error": str(error)}] * len(batch)
        return [outcome_of(result, self.options, self.warn) for result in results]

    def _post(self, batch: Sequence[Attempt]) -> list[Any]:
        items = []
        for attempt in batch:
            columns = {"problem": "", "answer": attempt.truth, **(attempt.row or {})}
            item = {
                "response": attempt.reasoning,
                "answer": columns.pop("answer"),
                "problem": columns.pop("problem"),
                "columns": columns,
            }
            items.append(item)
        body = json.loads(json.dumps({"items": items}, default=str))
        reply = self.client.call("", body, problem=lambda reply: self._problem(reply, len(items)))
        return [self._without_key(result) for result in reply["results"]]

    def _problem(self, reply: object, count: int) -> str:
        """Return what is wrong with a reply, "" if nothing is."""
        got = self.client.without_key(repr(reply))[:60]
        if isinstance(reply, dict) and isinstance(reply.get("results"), list):
            results = reply["results"]
            if len(results) == count:
                return ""
            got = f"{len(results)} results"
        return f"expected a JSON object with {count} results, got {got}"

    def _without_key(self, value: object) -> object:
        """Return a value of the reply without the key, which the server knows and may repeat."""
        if isinstance(value, str):
            return self.client.without_key(value, lines=True)
        if isinstance(value, list):
            return [self._without_key(item) for item in value]
        if isinstance(value, dict):
            return {
                self.client.without_key(name): self._without_key(item)
                for name, item in value.items()
            }
        return value


ENDPOINT = VerifierKind(
    form=FREE,
    build=lambda name, options, tests: EndpointVerifier(name, options),
    digest=lambda name: name,
)
