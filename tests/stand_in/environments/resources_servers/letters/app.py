"""A resource server: the letter in brackets is right."""

from __future__ import annotations

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class LettersConfig(BaseResourcesServerConfig):
    part_of_reward: float


class LettersRequest(BaseVerifyRequest):
    expected_answer: str


class LettersServer(SimpleResourcesServer):
    config: LettersConfig

    async def verify(self, body: LettersRequest) -> BaseVerifyResponse:
        text = body.response["output"][0]["content"][0]["text"]
        reward = 1.0 if f"[{body.expected_answer}]" in text else 0.0
        if "[idk]" in text:
            reward = self.config.part_of_reward
        return BaseVerifyResponse(**body.model_dump(), reward=reward, said=text)
