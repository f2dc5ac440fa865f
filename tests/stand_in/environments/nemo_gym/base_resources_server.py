"""The stand-in's base of resource servers."""

from __future__ import annotations

from typing import Any

from nemo_gym.server_utils import served
from pydantic import BaseModel, ConfigDict


class BaseResourcesServerConfig(BaseModel):
    name: str
    host: str
    port: int
    entrypoint: str


class BaseVerifyRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    responses_create_params: dict[str, Any]
    response: dict[str, Any]


class BaseVerifyResponse(BaseVerifyRequest):
    reward: float


class SimpleResourcesServer(BaseModel):
    config: BaseResourcesServerConfig
    server_client: Any

    async def seed_session(self, body: BaseModel) -> None:
        return None

    def setup_webserver(self) -> Any:
        async def seed(session: str, body: dict[str, Any]) -> Any:
            return {}

        async def verify(session: str, body: dict[str, Any]) -> Any:
            return await self.verify(BaseVerifyRequest(**body))  # type: ignore[attr-defined]

        return served({"/seed_session": seed, "/verify": verify})
