"""The stand-in's agent: it asks the model, and the resource server for its tools, until it is
done.
"""

from __future__ import annotations

import json
from typing import Any

from nemo_gym.server_utils import served
from pydantic import BaseModel


class SimpleAgentConfig(BaseModel):
    name: str
    host: str
    port: int
    entrypoint: str
    resources_server: dict[str, str]
    model_server: dict[str, str]


class SimpleAgent(BaseModel):
    config: SimpleAgentConfig
    server_client: Any

    def setup_webserver(self) -> Any:
        return served({"/run": self.run})

    async def run(self, session: str, body: dict[str, Any]) -> Any:
        resources, model = self.config.resources_server["name"], self.config.model_server["name"]
        post = self.server_client.post
        reply = await post(resources, "/seed_session", json=body, cookies={})
        cookies = reply.cookies
        asked = body["responses_create_params"]
        output: list[dict[str, Any]] = []
        while True:
            answered = await post(model, "/v1/responses", json={**asked, "said": output})
            answered.raise_for_status()
            said = (await answered.json())["output"]
            output += said
            calls = [one for one in said if one["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                arguments = json.loads(call["arguments"])
                result = await post(resources, f"/{call['name']}", json=arguments, cookies=cookies)
                text = (await result.content.read()).decode()
                output.append(
                    {"type": "function_call_output", "call_id": call["call_id"], "output": text}
                )
        if body.get("given_up"):
            return {"reward": 0.0, "mask_sample": True, "failure_kind": "no time"}
        verified = await post(
            resources, "/verify", json={**body, "response": {"output": output}}, cookies=cookies
        )
        verified.raise_for_status()
        return await verified.json()
