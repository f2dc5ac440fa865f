"""The stand-in's configuration of the head server."""

from pydantic import BaseModel


class BaseServerConfig(BaseModel):
    host: str
    port: int
