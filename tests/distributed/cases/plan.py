"""One rank: what it really holds, and what the plan says about it."""

from benchmarks.rank_memory import measure as run

__all__ = ["run"]
