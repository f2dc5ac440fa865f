"""The stand-in's client of other servers."""

from typing import Any

from pydantic import BaseModel


class ServerClient(BaseModel):
    head_server_config: Any
    global_config_dict: Any
