"""A resource server whose configuration refers to another part of NeMo Gym's."""

from __future__ import annotations

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class ReferringConfig(BaseResourcesServerConfig):
    label: str


class ReferringServer(SimpleResourcesServer):
    config: ReferringConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)
