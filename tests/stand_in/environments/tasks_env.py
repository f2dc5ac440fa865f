"""An environment of one turn with tasks: words to be repeated. Its options make it one of those
that are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Literal

import verifiers.v1 as vf

__all__ = ["WordTaskset"]


class WordData(vf.TaskData):
    answer: str
    length: int = 0


class WordTask(vf.Task):
    DATA = WordData

    @vf.reward(weight=2.0)
    async def repeated(self, trace: vf.Trace) -> float:
        assert [node.sampled for node in trace.nodes] == [False, False, True]
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=-1.0)
    async def shouted(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isupper())


class RuntimeTask(WordTask):
    @vf.reward(weight=1.0)
    async def compiled(self, trace: vf.Trace, runtime: object) -> float:
        return 1.0


class SetupTask(WordTask):
    async def setup(self, trace: vf.Trace, runtime: object) -> None:
        return None


class WordConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    opened: bool = True


class WordTaskset(vf.Taskset):
    INFINITE = True
    CONFIG = WordConfig
    TASK = WordTask

    def load(self) -> Iterator[vf.Task]:
        for number in count():
            word = f"{self.config.split}{number}"
            data = WordData(
                prompt=f"Say {word}." if self.config.opened else None,
                system_prompt="Repeat.",
                answer=word,
                length=len(word),
            )
            yield self.TASK(data, self.config.task)
