"""Problems that Reasoning Gym makes, with scores of its own: how a path names them."""

from __future__ import annotations

REASONING_GYM = "reasoning_gym:"  # opens the path of a task
# PYTHONHASHSEED of processes that make problems or judge: some depend on the order of sets
HASH_SEED = "0"


def is_gym(path: object) -> bool:
    """Return whether ``path`` names a task of Reasoning Gym."""
    return str(path).startswith(REASONING_GYM)


def name_of_task(path: str) -> str:
    """Return the name of a task; options that follow it are no part of it."""
    return path.removeprefix(REASONING_GYM).partition("?")[0]
