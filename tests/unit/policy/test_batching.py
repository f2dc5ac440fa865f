"""Batching: every sample once, counts equal on all ranks, logits rows one before their labels,
padding never seen.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.policy.batching import assign_to_ranks, collate, split_micro_batches
from megatron_dcpo.runtime import device
from tests.helpers.samples import bare

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(10, 120),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_sample_once_and_counts_agree(
    lengths, ranks, micro_batch_size, max_tokens, packing, multiple
):
    shares = assign_to_ranks(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    of_rank = [[lengths[i] for i in share] for share in shares]
    options = {
        "micro_batch_size": micro_batch_size,
        "max_tokens": max_tokens,
        "packing": packing,
        "multiple_of": multiple,
    }
    splits = [split_micro_batches(of_rank, rank, **options) for rank in range(ranks)]
    assert len({len(split) for split in splits}) == 1
    assert len(splits[0]) % multiple == 0
    for rank, split in enumerate(splits):
        assert sorted(i for members in split for i in members) == list(range(len(shares[rank])))
        for members in split:
            if packing and len(members) > 1:
                assert sum(of_rank[rank][i] for i in members) <= max_tokens
            if not packing:
                assert len(members) <= micro_batch_size


def test_tokens_are_balanced_over_ranks():
    lengths = np.random.default_rng(0).integers(100, 3000, 512).tolist()
    totals = [sum(lengths[i] for i in share) for share in assign_to_ranks(lengths, 8)]
    assert max(totals) / min(totals) < 1.01


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("multiple", [1, 4])
def test_rows_point_one_before_their_labels(packing, multiple):
    """Position p scores token p + 1. A shift by one in either direction fails here."""
    samples = [bare([1, 2, 3], [4, 5]), bare([6], [7, 8, 9])]
    (batch,) = collate(samples, [[1, 0]], packing=packing, multiple_of=multiple)
    flat = batch.tokens.reshape(-1)
    assert flat[batch.rows + 1].tolist() == batch.targets.tolist() == [7, 8, 9, 4, 5]
    assert flat[batch.rows].tolist() == [6, 7, 8, 3, 4]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert batch.samples == (samples[1], samples[0])
    assert batch.tokens.shape[1] % multiple == 0


def test_padded_rows_have_few_widths_on_a_gpu(monkeypatch):
    """Where cuDNN makes a graph for each; elsewhere, and packed, nothing is added."""
    samples = [bare(range(length), range(3)) for length in range(1, 300)]
    splits = [[index] for index in range(len(samples))]

    def widths(**how):
        return {batch.tokens.shape[1] for batch in collate(samples, splits, **how)}

    on_cpu = widths(packing=False)
    packed = widths(packing=True)
    monkeypatch.setattr(device, "_CPU", device._GPU)
    assert widths(packing=False) == {64, 128, 192, 256, 320}
    assert widths(packing=False, multiple_of=3) == {192, 384}
    assert widths(packing=True) == packed == on_cpu == set(range(4, 303))
    first = next(collate(samples, splits, packing=False))
    assert first.rows.tolist() == [0, 1, 2], "what is scored does not change"


def test_packed_positions_restart():
    samples = [bare(range(3), range(2)), bare(range(2), range(4))]
    (batch,) = collate(samples, [[0, 1]], packing=True, multiple_of=4)
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 5, 11, 12]


def test_empty_micro_batch_has_no_tokens_to_train_on():
    (batch,) = collate([bare([1], [2])], [[]], packing=False)
    assert batch.rows.numel() == batch.targets.numel() == 0
    assert batch.tokens.shape == torch.Size([1, 1])


@pytest.mark.parametrize(("uniform", "multiple"), [(False, 1), (False, 8), (True, 1)])
def test_packing_wastes_at_most_three_percent(uniform, multiple):
    """On lengths like those of real responses (log-normal, cut at 3,000), also where all packs must
    have one shape.
    """
    rng = np.random.default_rng(0)
    lengths = (150 + np.clip(rng.lognormal(np.log(800), 0.6, 512), 1, 3000)).astype(int).tolist()
    shares = assign_to_ranks(lengths, 4)
    of_rank = [[lengths[i] for i in share] for share in shares]
    computed = 0
    for rank, own in enumerate(of_rank):
        samples = [bare([0], [0] * (length - 1)) for length in own]
        splits = split_micro_batches(
            of_rank,
            rank,
            micro_batch_size=1,
            max_tokens=16384,
            packing=True,
            multiple_of=4 if uniform else 1,
        )
        batches = list(
            collate(samples, splits, packing=True, multiple_of=multiple, uniform=uniform)
        )
        assert all(batch.tokens.numel() <= 16384 + multiple for batch in batches)
        computed += sum(batch.tokens.numel() for batch in batches)
    assert 1 - sum(lengths) / computed <= 0.03
