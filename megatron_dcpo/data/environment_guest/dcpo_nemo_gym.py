"""Resource servers of NeMo Gym, whose ``verify`` gives the reward of a response. The server's
object is made in this process, with the configuration that comes with it; nothing listens on a
port.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from dcpo_environment import Refused, described, import_environment, plain_numbers, text_messages

# what a server's configuration says about the server and its class has no field for
_ABOUT = ("domain", "verified", "description", "value", "verified_url")
_TEXT = 200  # characters of a text in the reply that is logged


def open_server(name: str, description: Mapping[str, Any]) -> ResourceServer:
    """Return the resource server ``resources_servers.NAME``, configured by its own file and the
    options. Raises :class:`Refused`.
    """
    try:
        from nemo_gym.base_resources_server import SimpleResourcesServer
    except ImportError as error:
        raise Refused(
            f"NeMo Gym cannot be imported ({described(error)}); install nemo-gym and name its "
            "Python (python=.../bin/python)"
        ) from None
    found = importlib.util.find_spec(f"resources_servers.{name}")
    for place in (found and found.submodule_search_locations) or ():
        sys.path.append(place)  # NeMo Gym starts a server in its own directory
    module = import_environment(f"resources_servers.{name}.app")
    servers = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, SimpleResourcesServer)
        and value.__module__ == module.__name__
    ]
    if len(servers) != 1:
        raise Refused(f"its app.py has {len(servers)} resource servers; expected one")
    kind = servers[0]
    _check_server(kind, SimpleResourcesServer)
    folder = Path(module.__file__ or "").parent
    own = _own_values(folder, name)
    _check_told(own, description["options"])
    values = {**own, **description["options"]}
    config = _config(kind, name, values, description["judge"])
    try:
        server = kind(config=config, server_client=_nobody())
    except Exception as error:
        raise Refused(f"making it failed with {described(error)}") from None
    if description["judge"]:
        object.__setattr__(server, "server_client", _Judge(description["judge"]))
    return ResourceServer(server, folder, description)


def _check_server(kind: type, base: type) -> None:
    """Raise :class:`Refused` if the reward depends on more than the text of one response."""
    if kind.seed_session is not base.seed_session:  # type: ignore[attr-defined]
        raise Refused(
            f"{kind.__name__} prepares a session for each response; only servers that verify the "
            "text alone are supported"
        )
    verify = inspect.signature(kind.verify).parameters  # type: ignore[attr-defined]
    if list(verify) != ["self", "body"]:
        raise Refused(
            f"verify of {kind.__name__} takes {', '.join(verify)}; only servers that verify the "
            "text alone are supported"
        )


def _own_values(folder: Path, name: str) -> dict[str, Any]:
    """Return the fields of the configuration that comes with a server, which may be none."""
    import yaml

    file = folder / "configs" / f"{name}.yaml"
    if not file.is_file():
        return {}
    for entry in (yaml.safe_load(file.read_text()) or {}).values():
        servers = entry.get("resources_servers", {}) if isinstance(entry, dict) else {}
        if name in servers:
            return {k: v for k, v in servers[name].items() if k not in _ABOUT}
    return {}


def _check_told(own: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise :class:`Refused` if a field that no option replaces refers to another part of NeMo
    Gym's configuration, which is not read here.
    """
    for field, value in own.items():
        if field not in options and "${" in str(value):
            raise Refused(
                f"its {field} is {value!r}, which another part of NeMo Gym's configuration says; "
                f"add {field}=..."
            )


def _config(kind: type, name: str, values: dict[str, Any], judge: object) -> Any:  # noqa: ANN401
    """Return the configuration of a server. Raises :class:`Refused` for an unknown field, and if
    the server asks a model whose address is not given.
    """
    fields = kind.model_fields["config"].annotation.model_fields  # type: ignore[attr-defined]
    unknown = [field for field in values if field not in fields]
    if unknown:
        raise Refused(f"it has no option {unknown[0]!r}; valid: {', '.join(fields)}")
    asks = [field for field in fields if field.endswith("_model_server")]
    if asks and not judge:
        raise Refused(
            f"it asks a judge model ({asks[0]}); add judge=http://HOST:PORT, a server with the "
            "path /v1/responses, and see judging.test_seconds"
        )
    if judge and not (isinstance(judge, str) and judge.startswith("http")):
        raise Refused(f"judge={judge}: expected http://HOST:PORT, the address of the judge")
    base = {"name": name, "host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}
    asked = {field: {"type": "responses_api_models", "name": "judge"} for field in asks}
    try:
        return kind.model_fields["config"].annotation(**{**base, **asked, **values})  # type: ignore[attr-defined]
    except Exception as error:
        raise Refused(f"its options are refused with {described(error)}") from None


def _nobody() -> Any:  # noqa: ANN401 - NeMo Gym's ServerClient
    """Return the client of other servers that NeMo Gym wants; it knows none."""
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({}),
    )


class _Judge:
    """The model servers of NeMo Gym's configuration, all at one address."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")

    async def post(self, server_name: str, url_path: str, **options: Any) -> _Reply:  # noqa: ANN401
        import aiohttp

        body = options.pop("json", None)
        if hasattr(body, "model_dump"):
            body = body.model_dump(mode="json", exclude_unset=True)
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.address + url_path, json=body) as reply,
        ):
            return _Reply(reply.status, await reply.read())


class _Reply:
    """The reply of a judge. One that is no success raises at once, so that it is no verdict."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status = status
        self.content = content
        if status >= 400:
            raise ValueError(f"the judge replied with status {status}")

    async def read(self) -> bytes:
        return self.content

    async def json(self) -> Any:  # noqa: ANN401 - JSON of any shape
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        return None


class ResourceServer:
    """A resource server as an environment of one turn (``dcpo_environment.OneTurnEnvironment``)."""

    def __init__(
        self,
        server: Any,  # noqa: ANN401 - NeMo Gym's SimpleResourcesServer
        folder: Path,
        description: Mapping[str, Any],
    ) -> None:
        self.server = server
        self.folder = folder
        self.description = description
        self.body = get_type_hints(type(server).verify)["body"]

    def rows(self) -> Iterator[dict[str, Any]]:
        size = self.description["size"]
        if self.description["part"]:
            part = self.description["part"]
            raise Refused(f"part={part}: it has no parts; data=FILE names the problems")
        file = self.description["data"]
        if not file:
            example = self.folder / "data" / "example.jsonl"
            hint = f", for instance {example}" if example.is_file() else ""
            raise Refused(f"it needs data=FILE, JSON lines of its problems{hint}")
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(filter(str.strip, lines)):
                if size is not None and number >= size:
                    return
                yield self._row(_problem(line, number), number)

    def _row(self, given: dict[str, Any], number: int) -> dict[str, Any]:
        asked = given.get("responses_create_params") or {}
        if asked.get("tools"):
            raise Refused(
                f"problem {number + 1} has tools; only problems without tools are supported"
            )
        messages = asked.get("input")
        if not messages:
            raise Refused(f"problem {number + 1} has no responses_create_params.input")
        messages = text_messages(messages)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if asked.get("instructions"):
            system = {"role": "system", "content": asked["instructions"]}
            messages = [system, *messages]
        if number == 0:
            self.body.model_validate({**given, "response": _response("")})
        answer = given.get("expected_answer", given.get("answer"))
        return {
            "messages": messages,
            "answer": answer if isinstance(answer, str | int | float) else "",
            "input": given,
            "numbers": plain_numbers(given),
        }

    async def score(self, given: Any, text: str) -> tuple[float, dict[str, Any]]:  # noqa: ANN401
        body = self.body.model_validate({**given, "response": _response(text)})
        reply = (await self.server.verify(body)).model_dump(mode="json")
        logged = {}
        for name, value in reply.items():
            if name == "reward" or (name in given and given[name] == value):
                continue
            if isinstance(value, bool | int | float) or (
                isinstance(value, str) and len(value) <= _TEXT
            ):
                logged[name] = value
        return reply["reward"], logged


def _problem(line: str, number: int) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise Refused(f"data: problem {number + 1} is no JSON ({error})") from None
    if not isinstance(given, dict):
        raise Refused(f"data: problem {number + 1} is no JSON object")
    return given


def _response(text: str) -> dict[str, Any]:
    """Return a response as the Responses API has it, with one message."""
    content = {"type": "output_text", "text": text, "annotations": []}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [content],
    }
    return {
        "id": "resp_1",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
