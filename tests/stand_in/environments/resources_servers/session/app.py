"""A resource server that keeps a session: a counter that a tool advances."""

from __future__ import annotations

from typing import Any

from nemo_gym.base_resources_server import (
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import served


class SessionServer(SimpleResourcesServer):
    counters: dict[str, int] = {}  # noqa: RUF012 - a field of pydantic's

    async def seed_session(self, session: str, body: dict[str, Any]) -> Any:  # type: ignore[override]
        self.counters[session] = body["initial_count"]
        return {}

    async def add(self, session: str, body: dict[str, Any]) -> Any:
        self.counters[session] += body["count"]
        return {"count": self.counters[session]}

    async def verify(self, session: str, body: dict[str, Any]) -> Any:
        reward = float(self.counters[session] == body["expected_count"])
        return BaseVerifyResponse(**BaseVerifyRequest(**body).model_dump(), reward=reward)

    def setup_webserver(self) -> Any:
        return served(
            {"/seed_session": self.seed_session, "/add": self.add, "/verify": self.verify}
        )
