from types import SimpleNamespace as BaseServerConfig  # noqa: F401
