from types import SimpleNamespace
from types import SimpleNamespace as ServerClient  # noqa: F401


def is_global_aiohttp_client_setup():
    return True


class Server:
    model_fields = {"config": SimpleNamespace(annotation=SimpleNamespace)}  # noqa: RUF012

    def __init__(self, config, server_client):
        self.config = config
        self.server_client = server_client

    def setup_webserver(self):
        return self.answer
