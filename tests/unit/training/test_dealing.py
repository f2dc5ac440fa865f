"""Dealing: tokens stay where they were sampled until a rank asks for them, and then travel once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.training.dealing import Summary, fetch
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample

RANKS = 3


class Meeting:
    """Three ranks that are threads: an exchange hands over what all have brought."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.brought: list[Any] = [None] * RANKS
        self.sent = [0] * RANKS  # payloads that each rank sent

    def exchange(self, rank: int, outgoing: list[Any]) -> list[Any]:
        self.brought[rank] = outgoing
        self.barrier.wait(10)
        incoming = [self.brought[other][rank] for other in range(RANKS)]
        self.barrier.wait(10)
        return incoming


class RankOfMeeting(Collectives):
    """What one of the threads takes for the process group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        object.__setattr__(self, "meeting", meeting)
        object.__setattr__(self, "number", rank)

    @property
    def ranks(self) -> range:
        return range(RANKS)

    def exchange(self, outgoing: Any) -> list[Any]:
        meeting: Meeting = self.meeting  # type: ignore[attr-defined]
        rank: int = self.number  # type: ignore[attr-defined]
        meeting.sent[rank] += sum(len(of_rank) for of_rank in outgoing)
        return meeting.exchange(rank, list(outgoing))


def response(index: int) -> Response:
    length = index + 1
    return Response(
        "p",
        index,
        np.arange(length) + 10 * index,
        np.full(length, -0.5, np.float32),
        "stop",
        4,
        experts=np.full((length + 1, 2, 2), index, np.int16),
        text="a text",
        segments=((3, 1), (4, index)),
    )


def as_known_to(rank: int, holders: list[int]) -> list[TrainingSample]:
    """The samples of a batch, of which ``rank`` has the tokens that it sampled."""
    samples = []
    for index, holder in enumerate(holders):
        whole = response(index)
        known = whole if holder == rank else Summary.of(whole).restored(holder)
        judgement = Judgement("p", 1.0, 0.5, "ok", 0, index + 1)
        samples.append(TrainingSample(Prompt("p", (), (1,), "", "t"), known, judgement))
    return samples


def test_a_summary_has_the_length_and_no_plausible_token() -> None:
    known = Summary.of(response(4)).restored(holder=2)
    assert len(known.token_ids) == len(known.logprobs) == 5
    assert (known.token_ids == -1).all()
    assert np.isnan(known.logprobs).all()
    assert (known.experts, known.text, known.holder) == (None, None, 2)
    assert (known.key, known.oldest_version) == (("p", 4), 3)
    memory = known.token_ids.base if known.token_ids.base is not None else known.token_ids
    assert memory.nbytes == 8, "one element that is shown as often as there are tokens"


def test_every_rank_gets_what_it_wants_from_the_rank_that_has_it() -> None:
    holders = [0, 1, 2, 0, 1, 2]
    wanted = [[0, 1, 5], [2, 3], [4, 2]]
    meeting = Meeting()

    def rank_of(rank: int) -> list[TrainingSample]:
        samples = as_known_to(rank, holders)
        return fetch(samples, wanted[rank], RankOfMeeting(meeting, rank))

    with ThreadPoolExecutor(RANKS) as pool:
        complete = list(pool.map(rank_of, range(RANKS)))
    for rank, samples in enumerate(complete):
        for index, sample in enumerate(samples):
            has_tokens = index in wanted[rank] or holders[index] == rank
            assert (sample.response.holder is None) == has_tokens
            if has_tokens:
                whole = response(index)
                np.testing.assert_array_equal(sample.response.token_ids, whole.token_ids)
                np.testing.assert_array_equal(sample.response.logprobs, whole.logprobs)
                np.testing.assert_array_equal(sample.response.experts, whole.experts)
    # an index asked for, and a payload sent: five of each, for two are where they are wanted
    assert sum(meeting.sent) == 2 * 5


def test_a_rank_that_was_asked_in_error_says_so() -> None:
    samples = as_known_to(0, [1])
    alone = Collectives()

    class Confused(Collectives):
        ranks = range(1)  # type: ignore[assignment]

        def exchange(self, outgoing: Any) -> list[Any]:
            return [[0]]

    with pytest.raises(AssertionError):
        fetch(samples, [], Confused(alone.group))
