"""The environment of ``tasks_env`` with turns of its own."""

import verifiers.v1 as vf
from tasks_env import WordTaskset

__all__ = ["TurnsEnv", "TurnsTaskset"]


class TurnsEnv(vf.SingleAgentEnv):
    pass


class TurnsTaskset(WordTaskset):
    pass
