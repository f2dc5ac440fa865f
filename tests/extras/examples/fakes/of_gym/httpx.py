"""What ``nemo_gym_agent.py`` uses of httpx: the fakes' servers are functions of path and JSON."""

from types import SimpleNamespace


class ASGITransport:
    def __init__(self, app):
        self.app = app


class AsyncClient:
    def __init__(self, transport, **options):
        self.app = transport.app

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    async def request(self, method, path, json):
        value = await self.app(path, json)
        return SimpleNamespace(
            status_code=200,
            is_success=True,
            cookies={},
            json=lambda: value,
            raise_for_status=lambda: None,
        )
