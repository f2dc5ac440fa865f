"""A resource server that asks a judge."""

from __future__ import annotations

from typing import Any

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class JudgedConfig(BaseResourcesServerConfig):
    judge_model_server: Any


class JudgedServer(SimpleResourcesServer):
    config: JudgedConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)
