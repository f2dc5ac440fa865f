"""Resource servers of NVIDIA's NeMo Gym (0.4) with the agent that their configuration names, as
agents, in the Python that has them (docs/agents.md). The name behind the colon is the server:

    gym/bin/python nemo_gym_agent.py --rows mcqa > rows.jsonl          (the examples it comes with)
    gym/bin/python nemo_gym_agent.py --rows mcqa --data train.jsonl > rows.jsonl

    data: {path: rows.jsonl, template: chat}
    rollout:
      agent: nemo_gym_agent.py:mcqa
      agent_python: gym/bin/python

A session is ``POST /run`` of that agent, which asks the resource server and the policy. The
servers' objects are in the session's process, and nothing listens on a port.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import httpx
import yaml
from nemo_gym import server_utils
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

MARKER = "<conf>"  # opens the stated confidence, which verify is not to see
# what a configuration says about a server that is no option of it
ABOUT = ("domain", "verified", "description", "value", "verified_url", "datasets", "license")
BASE = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}


def __getattr__(name):
    """Return the agent of the resource server ``name``, which is made once, before sessions."""
    if name.startswith("_"):
        raise AttributeError(name)
    servers = Servers()
    folder = folder_of(name)
    sys.path.append(str(folder))  # NeMo Gym starts a server in its own directory
    entries = yaml.safe_load((folder / "configs" / f"{name}.yaml").read_text())
    for entry, sections in entries.items():
        for section, kinds in sections.items():
            for kind, options in kinds.items():
                servers.add(entry, f"{section}.{kind}.app", options)
    agents = [entry for entry, sections in entries.items() if "responses_api_agents" in sections]
    if len(agents) != 1:
        raise ValueError(f"its configuration has {len(agents)} agents; one makes rollouts")
    (agent,) = entries[agents[0]]["responses_api_agents"].values()
    policy = agent["model_server"]["name"]
    importlib.import_module("responses_api_models.vllm_model.app")  # it takes long

    async def run(problem, client):
        options = {
            "base_url": str(client.base_url).rstrip("/"),
            "api_key": client.api_key,
            "model": "policy",
            "return_token_id_information": False,
            "uses_reasoning_parser": True,
        }
        if not server_utils.is_global_aiohttp_client_setup():
            config = server_utils.GlobalAIOHTTPAsyncClientConfig()
            server_utils.set_global_aiohttp_client(config)
        servers.add(policy, "responses_api_models.vllm_model.app", options)
        reply = await servers.post(agents[0], "/run", json=problem["row"]["input"])
        reply.raise_for_status()
        result = await reply.json()
        if result.get("mask_sample"):
            raise ValueError(f"the agent gave it up: {result.get('failure_kind')}")
        logged = {k: v for k, v in result.items() if isinstance(v, (bool, int, float))}
        return {**logged, "score": result["reward"]}

    return run


def folder_of(name):
    return Path(importlib.import_module(f"resources_servers.{name}").__path__[0])


class Servers:
    """NeMo Gym's servers by their names, and what they take for a client of one another."""

    def __init__(self):
        self.apps = {}

    def add(self, name, module, options):
        """Make the server that a module defines."""
        module = importlib.import_module(module)
        (kind,) = (
            each
            for each in vars(module).values()
            if isinstance(each, type)
            and each.__module__ == module.__name__
            and hasattr(each, "setup_webserver")
        )
        options = {key: value for key, value in options.items() if key not in ABOUT}
        config = kind.model_fields["config"].annotation(**{**BASE, "name": name, **options})
        nobody = ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
            global_config_dict=OmegaConf.create({}),
        )
        server = kind(config=config, server_client=nobody)
        object.__setattr__(server, "server_client", self)
        self.apps[name] = server.setup_webserver()

    async def post(self, server_name, url_path, **options):
        return await self.request("POST", server_name, url_path, **options)

    async def get(self, server_name, url_path, **options):
        return await self.request("GET", server_name, url_path, **options)

    async def request(self, method, server_name, url_path, json=None, cookies=None, **options):
        if hasattr(json, "model_dump"):
            json = json.model_dump(mode="json", exclude_unset=True)
        if url_path == "/verify":
            json = without_confidence(json)
        transport = httpx.ASGITransport(app=self.apps[server_name])
        address = "http://localhost"
        async with httpx.AsyncClient(
            transport=transport, base_url=address, cookies=cookies, timeout=None
        ) as client:
            reply = await client.request(method, url_path, json=json, **options)
            return Reply(reply, {**(cookies or {}), **reply.cookies})


class Reply:
    """A reply of httpx as aiohttp has it."""

    def __init__(self, reply, cookies):
        self.reply = reply
        self.status = reply.status_code
        self.ok = reply.is_success
        self.cookies = cookies
        self.content = self  # whose ``read`` is the same

    async def read(self):
        return self.reply.content

    async def json(self):
        return self.reply.json()

    def raise_for_status(self):
        self.reply.raise_for_status()


def without_confidence(body):
    """Return what is to be verified, the policy's texts cut at their confidence."""
    body = json.loads(json.dumps(body))
    for item in body["response"]["output"]:
        parts = item.get("content") or [] if item.get("role") == "assistant" else []
        for part in parts:
            part["text"] = part.get("text", "").partition(MARKER)[0]
    return body


def rows(lines):
    """Yield the problems of a file of NeMo Gym."""
    for line in filter(str.strip, lines):
        given = json.loads(line)
        asked = given["responses_create_params"]
        messages = asked["input"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if asked.get("instructions"):
            messages = [{"role": "system", "content": asked["instructions"]}, *messages]
        roles = {"developer": "system"}
        problem = [{**each, "role": roles.get(each["role"], each["role"])} for each in messages]
        # a row needs an answer to show, which the reward does not read
        answer = str(given.get("expected_answer", given.get("answer", ""))) or "-"
        yield {"problem": problem, "answer": answer, "input": given}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True, metavar="SERVER", help="print its problems")
    parser.add_argument("--data", help="its file of problems; default: the examples with it")
    arguments = parser.parse_args()
    file = arguments.data or folder_of(arguments.rows) / "data" / "example.jsonl"
    with open(file, encoding="utf-8") as problems:
        for row in rows(problems):
            print(json.dumps(row))
