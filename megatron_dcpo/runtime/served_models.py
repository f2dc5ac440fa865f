"""The address of an OpenAI-compatible server, and the models that it offers."""

from __future__ import annotations

import re
from typing import Any

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.http_json import HttpError, JsonClient, without_password

# paths of requests, which users copy together with the address
_REQUEST_PATHS = ("/chat/completions", "/completions", "/models")
VERSIONED = re.compile(r"/v\d+[a-z0-9]*\Z")

ModelRow = dict[str, Any]


def served_model(url: str, api_key: str | None = None, timeout: float = 30.0) -> str:
    """Return the single model that a server offers. Raises :class:`UserError` if there are several,
    or if it does not list them.
    """
    fix = "name one with --model-name"
    rows = list_models(url, fix, api_key, timeout)
    names = [str(row["id"]) for row in rows]
    if len(names) != 1:
        raise UserError(
            f"{without_password(url)} offers {', '.join(names)[:1000] or 'no model'}; {fix}"
        )
    return names[0]


def list_models(
    url: str, fix: str, api_key: str | None = None, timeout: float = 30.0
) -> list[ModelRow]:
    """Return what a server says of its models, each with an ``id``. Raises :class:`UserError`, in
    which ``fix`` is what to do about a server that does not list them.
    """
    named = without_password(url)
    try:
        return _rows(JsonClient(url=url, api_key=api_key, timeout=timeout))
    except (HttpError, LookupError, TypeError) as error:
        if isinstance(error, HttpError) and error.unreachable:
            raise UserError(
                f"{named}: no server accepts connections there ({error}); start it, or correct "
                "host and port of --endpoint"
            ) from None
        if VERSIONED.search(url.rstrip("/")) is None:
            below = f"{url.rstrip('/')}/v1"
            if _lists_models(JsonClient(url=below, api_key=api_key, timeout=timeout)):
                raise UserError(
                    f"{named}: the server answers below /v1; give --endpoint {named.rstrip('/')}/v1"
                ) from None
        raise UserError(f"{named}: cannot list its models ({one_line(error)}); {fix}") from None


def _rows(client: JsonClient) -> list[ModelRow]:
    rows = client.call("/models")["data"]
    return [{**row, "id": str(row["id"])} for row in rows]


def _lists_models(client: JsonClient) -> bool:
    try:
        return bool(_rows(client))
    except (HttpError, LookupError, TypeError):
        return False


def check_address(url: str) -> None:
    """Raise :class:`UserError` for the address of a request instead of that of the server."""
    for path in _REQUEST_PATHS:
        if url.rstrip("/").endswith(path):
            named = without_password(url)
            base = named.rstrip("/").removesuffix(path)
            raise UserError(
                f"{named} is the address of a request; give the part before {path}: "
                f"--endpoint {base}"
            )
