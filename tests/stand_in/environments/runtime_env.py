"""The environment of ``tasks_env`` with tasks that are refused."""

from tasks_env import RuntimeTask, WordTaskset

__all__ = ["RuntimeTaskset"]


class RuntimeTaskset(WordTaskset):
    TASK = RuntimeTask
