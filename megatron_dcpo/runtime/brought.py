"""Problems that a library makes or brings, with scores of their own: how a path names them."""

from __future__ import annotations

REASONING_GYM = "reasoning_gym:"  # opens the path of a task of Reasoning Gym
# as rollout.agent: the environment of a problem makes the responses to it
OWN_ROLLOUT = "environment"
# open the path of an environment of verifiers or NeMo Gym
ENVIRONMENTS = ("verifiers:", "nemo_gym:")
BROUGHT = (REASONING_GYM, *ENVIRONMENTS)
# PYTHONHASHSEED of processes that make problems or judge: some depend on the order of sets
HASH_SEED = "0"
# the column of a row that names its environment and the input of its scores
ENVIRONMENT_COLUMN = "environment"


def is_environment(path: object) -> bool:
    """Return whether ``path`` names an environment."""
    return str(path).startswith(ENVIRONMENTS)


def is_gym(path: object) -> bool:
    """Return whether ``path`` names a task of Reasoning Gym."""
    return str(path).startswith(REASONING_GYM)


def name_of_brought(path: str) -> str:
    """Return the name of a task, or of an environment without its owner and release; options that
    follow it are no part of it.
    """
    name = path.partition(":")[2].partition("?")[0]
    if is_gym(path):
        return name
    return name.rpartition("/")[2].partition("@")[0]
