"""A resource server that keeps a session."""

from __future__ import annotations

from nemo_gym.base_resources_server import (
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import BaseModel


class SessionServer(SimpleResourcesServer):
    async def seed_session(self, body: BaseModel) -> None:
        return None

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)
