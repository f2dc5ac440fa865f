"""Sequences cut for context parallelism: the ranks have every token once, first and last chunk
together, and every response token is scored where the position before it is.
"""

import dataclasses

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dcpo.policy import batching
from megatron_dcpo.policy.batching import collate
from megatron_dcpo.policy.context_parallel import positions_of
from megatron_dcpo.policy.layers import CausalAttention
from tests.helpers.samples import bare

LENGTHS = ((3, 9), (1, 1), (5, 20))
SAMPLES = [
    bare(range(1, 1 + p), range(100 * i, 100 * i + t)) for i, (p, t) in enumerate(LENGTHS, 1)
]


def test_first_and_last_chunk_together():
    assert positions_of([(0, 8)], 0, 2).tolist() == [0, 1, 6, 7]
    assert positions_of([(0, 8)], 1, 2).tolist() == [2, 3, 4, 5]
    assert positions_of([(0, 4), (4, 12)], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]


def cut(packing, size, multiple_of):
    options = {"packing": packing, "multiple_of": multiple_of}
    parts = [
        next(collate(SAMPLES, [[0, 1, 2]], context_parallel=(rank, size), **options))
        for rank in range(size)
    ]
    return [dataclasses.replace(part, columns={"number": torch.arange(30)}) for part in parts]


@pytest.mark.parametrize("packing", [False, True])
def test_nothing_is_read_back_from_the_device(packing, monkeypatch):
    """A tensor without values stands for one that is still on its way."""
    monkeypatch.setattr(
        batching, "to_device", lambda values, dtype=None: torch.tensor(values).to("meta", dtype)
    )
    (whole,) = cut(packing, 1, 1)
    (part, _) = cut(packing, 2, 1)
    assert (whole.rows.device.type, part.here.device.type) == ("meta", "meta")
    if packing:
        query = torch.randn(whole.tokens.shape[1], 2, 4)
        attention = CausalAttention(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2), 1
        )
        out = attention(query, query, query, packed_seq_params=whole.packed_seq_params)
        assert out.shape == (len(query), 8)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("size", "multiple_of"), [(2, 1), (3, 1), (2, 2), (4, 4)])
def test_every_token_is_on_one_rank_and_scored_there(packing, size, multiple_of):
    parts = cut(packing, size, multiple_of)
    (whole,) = cut(packing, 1, 1)
    assert all(part.tokens.shape[1] % multiple_of == 0 for part in parts)
    found = torch.cat([part.here for part in parts])
    assert sorted(found.tolist()) == list(range(30)), "each response token's logits are on one rank"
    for part in parts:
        assert part.targets.tolist() == whole.targets.tolist(), "the loss sees all"
        local = part.local()
        tokens, positions = (
            part.tokens.reshape(-1)[local.rows],
            part.position_ids.reshape(-1)[local.rows],
        )
        assert tokens.tolist() == whole.tokens.reshape(-1)[whole.rows[part.here]].tolist()
        assert positions.tolist() == whole.position_ids.reshape(-1)[whole.rows[part.here]].tolist()
        assert local.targets.tolist() == whole.targets[part.here].tolist()
        assert local.columns["number"].tolist() == part.here.tolist()
    if packing:
        bounds = parts[0].packed_seq_params.cu_seqlens_q.tolist()
        assert all(bound % (2 * size) == 0 for bound in bounds)
        assert bounds[-1] == size * parts[0].tokens.shape[1], "Megatron divides them itself"
