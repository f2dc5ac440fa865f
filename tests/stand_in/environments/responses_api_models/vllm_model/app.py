"""The stand-in's model server: Responses to chat completions of a server."""

from __future__ import annotations

from typing import Any

import openai
from nemo_gym.server_utils import served
from pydantic import BaseModel


class VLLMModelConfig(BaseModel):
    name: str
    host: str
    port: int
    entrypoint: str
    base_url: str
    api_key: str
    model: str
    return_token_id_information: bool
    uses_reasoning_parser: bool


class VLLMModel(BaseModel):
    config: VLLMModelConfig
    server_client: Any

    def setup_webserver(self) -> Any:
        return served({"/v1/responses": self.responses})

    async def responses(self, session: str, body: dict[str, Any]) -> Any:
        messages = list(body["input"])
        for one in body["said"]:
            if one["type"] == "message":
                messages.append({"role": "assistant", "content": one["content"][0]["text"]})
            elif one["type"] == "function_call":
                function = {"name": one["name"], "arguments": one["arguments"]}
                call = {"id": one["call_id"], "type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            else:
                result = {"tool_call_id": one["call_id"], "content": one["output"]}
                messages.append({"role": "tool", **result})
        tools = []
        for tool in body.get("tools", []):
            function = {key: value for key, value in tool.items() if key != "type"}
            tools.append({"type": "function", "function": function})
        options: dict[str, Any] = {"tools": tools} if tools else {}
        client = openai.AsyncOpenAI(base_url=self.config.base_url, api_key=self.config.api_key)
        reply = await client.chat.completions.create(
            model=self.config.model, messages=messages, **options
        )
        message = reply.choices[0].message
        output: list[dict[str, Any]] = []
        for called in message.tool_calls or []:
            function = called.function
            given = {"name": function.name, "arguments": function.arguments}
            output.append({"type": "function_call", "call_id": called.id, **given})
        if not output:
            text = {"type": "output_text", "text": message.content}
            output.append({"type": "message", "content": [text]})
        return {"output": output}
