"""The environment of ``tasks_env`` with tasks that are refused."""

from tasks_env import SetupTask, WordTaskset

__all__ = ["SetupTaskset"]


class SetupTaskset(WordTaskset):
    TASK = SetupTask
