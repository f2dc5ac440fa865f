"""Which prompt stands where in a mixture, and in a curriculum: functions of seed and position
alone.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.data.datasets import draw_prompts
from megatron_dcpo.data.mixture import Mixture, curriculum, extended_fingerprint
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import Prompt


def prompts(name: str, values: list[object]) -> list[Prompt]:
    return [
        Prompt(f"{name}/{i}", (), (), "", name, row={"level": value})
        for i, value in enumerate(values)
    ]


SOURCES = [prompts("a", [0] * 7), prompts("b", [0] * 40), prompts("c", [0] * 3)]
WEIGHTS = [0.5, 0.375, 0.125]


def mixture(per_step: int = 16, seed: int = 1, shuffle: bool = True) -> Mixture:
    return Mixture(SOURCES, WEIGHTS, per_step, seed, shuffle, [None] * 3)


def ids(drawn: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in drawn]


@given(cuts=st.lists(st.integers(0, 200), max_size=5), shuffle=st.booleans())
def test_pieces_of_a_run_make_the_whole(cuts: list[int], shuffle: bool) -> None:
    """However a run is cut, each piece drawn by a new object: what resuming relies on."""
    bounds = [0, *sorted(cuts), 200]
    pieces = [ids(mixture(shuffle=shuffle)(a, b - a)) for a, b in itertools.pairwise(bounds)]
    assert list(itertools.chain(*pieces)) == ids(mixture(shuffle=shuffle)(0, 200))


def test_each_step_has_the_weights() -> None:
    """16 prompts of weights 1/2, 3/8, 1/8 are 8, 6 and 2, in an order of its own; each source goes
    through its epochs.
    """
    drawn = mixture()(0, 16 * 7)
    for step in range(7):
        assert Counter(prompt.task for prompt in drawn[step * 16 : (step + 1) * 16]) == {
            "a": 8,
            "b": 6,
            "c": 2,
        }
    assert (
        len({tuple(p.task for p in drawn[step * 16 : (step + 1) * 16]) for step in range(7)}) == 7
    )
    of_a = [prompt for prompt in drawn if prompt.task == "a"]
    assert len(set(ids(of_a))) == len(of_a) == 56
    assert ids(of_a) == ids(draw_prompts(SOURCES[0], 0, 56, seed=1, shuffle=True))


def test_the_mean_share_is_the_weight_where_it_is_no_whole_number() -> None:
    drawn = mixture(per_step=5)(0, 5 * 2000)
    steps = [Counter(p.task for p in drawn[n : n + 5]) for n in range(0, len(drawn), 5)]
    for task, weight in zip("abc", WEIGHTS, strict=True):
        counts = [step[task] for step in steps]
        assert {count - int(5 * weight) for count in counts} <= {0, 1}
        assert np.mean(counts) == pytest.approx(5 * weight, abs=0.05)


def test_a_curriculum_goes_up_and_shuffles_equal_ones() -> None:
    values = [3, 1, 2, 1, 3, 2, 1, 1]
    source = prompts("a", values)  # type: ignore[arg-type]
    ranks = curriculum(source, "level", "a.jsonl")
    epochs = [draw_prompts(source, n * 8, 8, seed=1, shuffle=True, ranks=ranks) for n in range(4)]
    assert all([prompt.row["level"] for prompt in epoch] == sorted(values) for epoch in epochs)  # type: ignore[index]
    assert len({tuple(p.prompt_id.partition("@")[0] for p in epoch) for epoch in epochs}) > 1
    plain = draw_prompts(source, 0, 8, seed=1, shuffle=False, ranks=ranks)
    assert [p.prompt_id for p in plain][:4] == ["a/1@0", "a/3@0", "a/6@0", "a/7@0"]


def test_numbers_of_a_table_are_ordered_as_numbers() -> None:
    assert curriculum(prompts("a", ["10", "9", "9.5"]), "level", "a.csv").tolist() == [2, 0, 1]
    assert curriculum(prompts("a", ["10", "9", "x"]), "level", "a.csv").tolist() == [0, 1, 2]


@pytest.mark.parametrize("values", [[1, "two"], [1, None], [None, None], ["a", 2]])
def test_a_column_that_cannot_be_sorted_is_one_line(values: list[object]) -> None:
    with pytest.raises(
        UserError, match=r"data.order=level: expected a number in every row of a.jsonl"
    ):
        curriculum(prompts("a", values), "level", "a.jsonl")


def test_the_fingerprint_is_of_prompts_weights_and_order() -> None:
    base = extended_fingerprint(["x", "y"], [0.5, 0.5], [None, None])
    others = [
        extended_fingerprint(["x", "z"], [0.5, 0.5], [None, None]),
        extended_fingerprint(["x", "y"], [0.25, 0.75], [None, None]),
        extended_fingerprint(["x", "y"], [0.5, 0.5], [np.arange(2), None]),
    ]
    assert len({base, *others}) == 4
