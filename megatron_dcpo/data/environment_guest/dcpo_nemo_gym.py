"""Resource servers of NeMo Gym, whose ``verify`` gives the reward of a response, and the agent that
their configuration names, which makes the responses. The servers' objects are made in this process,
with the configuration that comes with them; nothing listens on a port.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from dcpo_environment import (
    Refused,
    SessionFailed,
    described,
    import_environment,
    plain_numbers,
    text_messages,
)
from dcpo_nemo_gym_servers import Servers

# what a server's configuration says about the server and its class has no field for
_ABOUT = ("domain", "verified", "description", "value", "verified_url")
_OF_DATA = ("datasets", "license")  # and about an agent
_BASE = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}
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
    folder = Path(module.__file__ or "").parent
    told = _configuration(folder, name)
    entry, own = _entry_of(told, "resources_servers", name)
    own = {field: value for field, value in own.items() if field not in _ABOUT}
    _check_told(own, description["options"])
    values = {**own, **description["options"]}
    config = _config(kind, entry or name, values, description["judge"])
    connected = Servers(description["judge"] or "")
    server = _made(kind, config, connected)
    return ResourceServer(
        server=server,
        more_than_one_turn=_more_than_text(kind, SimpleResourcesServer),
        folder=folder,
        agents=_agents_of(told, entry),
        connected=connected,
        description=description,
    )


def _made(kind: type, config: Any, connected: Servers) -> Any:  # noqa: ANN401 - NeMo Gym's servers
    """Return a server whose client of other servers is ``connected``. Raises :class:`Refused`."""
    try:
        server = kind(config=config, server_client=_nobody())
    except Exception as error:
        raise Refused(f"making {kind.__name__} failed with {described(error)}") from None
    object.__setattr__(server, "server_client", connected)
    return server


def _more_than_text(kind: type, base: type) -> str:
    """Return why the reward depends on more than the text of one response, "" if it does not."""
    if kind.seed_session is not base.seed_session:  # type: ignore[attr-defined]
        return f"{kind.__name__} prepares a session for each response"
    verify = inspect.signature(kind.verify).parameters  # type: ignore[attr-defined]
    if list(verify) != ["self", "body"]:
        return f"verify of {kind.__name__} takes {', '.join(verify)}"
    return ""


def _configuration(folder: Path, name: str) -> dict[str, Any]:
    """Return the configuration that comes with a server, which may be none."""
    import yaml

    file = folder / "configs" / f"{name}.yaml"
    if not file.is_file():
        return {}
    return yaml.safe_load(file.read_text()) or {}


def _entry_of(told: Mapping[str, Any], section: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return the name under which a configuration has a server, and its fields; "" and none if it
    has none.
    """
    for entry, sections in told.items():
        servers = sections.get(section, {}) if isinstance(sections, dict) else {}
        if name in servers:
            return entry, dict(servers[name])
    return "", {}


def _agents_of(told: Mapping[str, Any], server: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the kinds and the fields of the agents that a configuration has for a resource server,
    by their names.
    """
    found = {}
    for entry, sections in told.items():
        agents = sections.get("responses_api_agents", {}) if isinstance(sections, dict) else {}
        for kind, values in agents.items():
            if (values.get("resources_server") or {}).get("name") == server:
                fields = {k: v for k, v in values.items() if k not in (*_ABOUT, *_OF_DATA)}
                found[entry] = (kind, fields)
    return found


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
    base = {"name": name, **_BASE}
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


class ResourceServer:
    """A resource server, with its agent, as an environment (``dcpo_environment.Environment``)."""

    def __init__(
        self,
        server: Any,  # noqa: ANN401 - NeMo Gym's SimpleResourcesServer
        more_than_one_turn: str,
        folder: Path,
        agents: Mapping[str, tuple[str, dict[str, Any]]],
        connected: Servers,
        description: Mapping[str, Any],
    ) -> None:
        self.server = server
        self.more_than_one_turn = more_than_one_turn
        self.folder = folder
        self.agents = agents
        self.connected = connected
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
        more = self.more_than_one_turn
        if asked.get("tools") and not more:
            more = f"problem {number + 1} has tools"
        messages = asked.get("input")
        if not messages:
            raise Refused(f"problem {number + 1} has no responses_create_params.input")
        messages = text_messages(messages)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if asked.get("instructions"):
            system = {"role": "system", "content": asked["instructions"]}
            messages = [system, *messages]
        if number == 0 and not more:
            self.body.model_validate({**given, "response": _response("")})
        answer = given.get("expected_answer", given.get("answer"))
        return {
            "messages": messages,
            "answer": answer if isinstance(answer, str | int | float) else "",
            "input": given,
            "numbers": plain_numbers(given),
            "more_than_one_turn": more,
        }

    def prepare(self) -> None:
        """Make the agent, so that sessions need not. Raises :class:`Refused`."""
        if len(self.agents) != 1:
            raise Refused(
                f"its configuration has {len(self.agents)} agents for it "
                f"({', '.join(self.agents) or 'none'}); one is needed to make rollouts"
            )
        ((name, (kind, fields)),) = self.agents.items()
        module = import_environment(f"responses_api_agents.{kind}.app")
        agent = _class_of(module, "run")
        config = agent.model_fields["config"].annotation  # type: ignore[attr-defined]
        left = [field for field, value in fields.items() if "${" in str(value)]
        if left:
            raise Refused(f"{left[0]} of its agent {name} is said by another configuration")
        made = _made(agent, _checked(config, {"name": name, **_BASE, **fields}), self.connected)
        self.connected.apps[name] = made.setup_webserver()
        self.connected.apps[self.server.config.name] = self.server.setup_webserver()
        self.agent = name
        self.policy = fields["model_server"]["name"]

    async def run(
        self,
        given: Any,  # noqa: ANN401 - a problem
        base_url: str,
        api_key: str,
    ) -> tuple[float, dict[str, Any]]:
        self.connected.apps[self.policy] = self._policy(base_url, api_key)
        reply = await self.connected.post(self.agent, "/run", json=given)
        reply.raise_for_status()
        result = await reply.json()
        if result.get("mask_sample"):
            raise SessionFailed(f"its agent gave it up: {result.get('failure_kind')}")
        return result["reward"], _logged(given, result)

    def _policy(self, base_url: str, api_key: str) -> Any:  # noqa: ANN401 - an ASGI application
        """Return NeMo Gym's server of a model for the policy at an address."""
        from nemo_gym import server_utils

        module = import_environment("responses_api_models.vllm_model.app")
        kind = module.VLLMModel
        if not server_utils.is_global_aiohttp_client_setup():
            server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
        values = {
            "name": self.policy,
            **_BASE,
            "base_url": base_url,
            "api_key": api_key,
            "model": "policy",
            "return_token_id_information": False,
            "uses_reasoning_parser": True,
        }
        config = kind.model_fields["config"].annotation
        return _made(kind, _checked(config, values), self.connected).setup_webserver()

    async def score(self, given: Any, text: str) -> tuple[float, dict[str, Any]]:  # noqa: ANN401
        body = self.body.model_validate({**given, "response": _response(text)})
        reply = (await self.server.verify(body)).model_dump(mode="json")
        return reply["reward"], _logged(given, reply)


def _class_of(module: Any, method: str) -> type:  # noqa: ANN401 - a module
    """Return the server that a module defines, by a ``method`` that it has. Raises
    :class:`Refused`.
    """
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and callable(getattr(value, method, None))
    ]
    if len(found) != 1:
        raise Refused(f"{module.__name__} has {len(found)} servers; expected one")
    return found[0]


def _checked(config: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - pydantic's models
    try:
        return config(**values)
    except Exception as error:
        raise Refused(f"{config.__name__} is refused with {described(error)}") from None


def _logged(given: Mapping[str, Any], reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server says of a response besides the reward and what it was given."""
    logged = {}
    for name, value in reply.items():
        if name == "reward" or (name in given and given[name] == value):
            continue
        if isinstance(value, bool | int | float) or (
            isinstance(value, str) and len(value) <= _TEXT
        ):
            logged[name] = value
    return logged


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
