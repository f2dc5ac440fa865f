"""The plan of a weight synchronization: every byte an engine rank lacks, once, and nothing else."""

import itertools
import math

import pytest

from megatron_dcpo.architectures.config_json import parse_architecture
from megatron_dcpo.config.rules import check_engine_size
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import plan
from megatron_dcpo.weights.reshard_plan import EngineRanks, engine_slice, reshard_plan
from megatron_dcpo.weights.table import hf_shapes

KINDS = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


def architecture(kind="qwen3", tied=False, **changes):
    config = {
        "architectures": [KINDS[kind]],
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 331,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return parse_architecture(config | changes)


def cells(name, dim, start, stop):
    return {(name, dim, index) for index in range(start, stop)}


UNEVEN = Layout(2, 2, num_layers_in_first_pipeline_stage=1)


def held_by(arch, layout, rank):
    held = set()
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        for copy in plan(
            arch, layout, layout.at(rank % layout.width, rank // layout.width, virtual)
        ):
            held |= cells(copy.hf, copy.dim, copy.hf_start, copy.hf_stop)
    return held


@pytest.mark.parametrize("engine_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "layout",
    [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(4, 1), Layout(1, 2, 2), UNEVEN],
)
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False), ("qwen2", True)])
def test_every_missing_byte_arrives_once(kind, tied, layout, replicas, engine_tp):
    arrives_once(architecture(kind, tied), layout, replicas, engine_tp)


@pytest.mark.parametrize(("replicas", "engine_tp"), [(1, 1), (2, 4)])
@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp"), [(1, 2, 2, 1), (2, 1, 2, 2), (2, 1, 4, 1), (4, 1, 2, 1)]
)
def test_every_missing_byte_of_experts_arrives_once(tp, pp, ep, etp, replicas, engine_tp):
    layout = Layout(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    arrives_once(architecture("qwen3_moe", num_hidden_layers=2), layout, replicas, engine_tp)


def arrives_once(arch, layout, replicas, engine_tp):
    """Counted index by index, by another way than the plan's: needed = held + received, and
    received not held.
    """
    made = reshard_plan(
        arch, layout, EngineRanks(engine_tp, replicas, replicas - 1), bucket_bytes=4000, itemsize=4
    )
    shapes, width, pp = (hf_shapes(arch), layout.width, layout.pipeline_model_parallel_size)
    assert made.received == made.least
    for rank in range(width * pp):
        engine_rank = (
            rank % width + width * (replicas - 1 + replicas * (rank // width))
        ) % engine_tp
        needed, arrived, sent = set(), [], 0
        for name in shapes:
            needed |= cells(name, *engine_slice(arch, name, engine_tp, engine_rank))
        for message in itertools.chain.from_iterable(bucket.messages for bucket in made.buckets):
            for op in message.ops if rank in message.readers else ():
                arrived += sorted(cells(op.hf, op.dim, op.start, op.stop))
                sent += op.numel
        held = held_by(arch, layout, rank)
        assert len(arrived) == len(set(arrived)), "nothing twice"
        assert set(arrived) == needed - held, "all that is missing, and nothing else"
        assert made.received[rank] == 4 * sent
        lacking = sum(
            math.prod(shapes[name]) // shapes[name][dim] for name, dim, _ in needed - held
        )
        assert made.least[rank] == 4 * lacking


def test_owners_hold_what_they_send_and_buckets_are_in_order():
    arch, layout = architecture(tied=True), Layout(2, 2)
    made = reshard_plan(arch, layout, EngineRanks(), 4000, 4)
    names = [entry.hf for bucket in made.buckets for entry in bucket.entries]
    assert list(dict.fromkeys(names)) == list(hf_shapes(arch))
    for message in itertools.chain.from_iterable(bucket.messages for bucket in made.buckets):
        for op in message.ops:
            assert cells(op.hf, op.dim, op.start, op.stop) <= held_by(arch, layout, message.owner)


@pytest.mark.parametrize("engine_tp", [1, 2, 8])
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), UNEVEN])
@pytest.mark.parametrize("bucket_bytes", [1100, 4000, 2**16, 2**20])
def test_peak_is_one_bucket(bucket_bytes, layout, engine_tp):
    """Whatever is larger comes in chunks: neighbours in order, one of a tensor per bucket, together
    the rank's slice.
    """
    arch = architecture(vocab_size=1000)
    made = reshard_plan(arch, layout, EngineRanks(engine_tp, 2), bucket_bytes, 4)
    assert made.peak_bytes <= bucket_bytes
    ranks = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    for rank in range(ranks):
        arrived = {}
        for bucket in made.buckets:
            assert len({entry.hf for entry in bucket.entries}) == len(bucket.entries)
            for entry in bucket.entries:
                dim, start, stop = entry.slices[rank]
                before = arrived.setdefault(entry.hf, [dim, start, start])
                assert before[2] == start
                before[2] = stop
        for name, found in arrived.items():
            tensor, pipeline = (
                rank % layout.tensor_model_parallel_size,
                rank // layout.tensor_model_parallel_size,
            )
            engine_rank = (
                tensor + layout.tensor_model_parallel_size * 2 * pipeline
            ) % engine_tp  # of replica 0 of 2
            assert tuple(found) == engine_slice(arch, name, engine_tp, engine_rank)
    if bucket_bytes == 4000 and layout == Layout(2, 1) and engine_tp == 1:
        assert (
            sum(
                entry.hf == "model.embed_tokens.weight" for b in made.buckets for entry in b.entries
            )
            > 50
        )


def test_a_bucket_smaller_than_a_row_is_refused():
    wide = architecture(
        intermediate_size=96, hidden_size=512
    )  # a row of the embedding has 2048 bytes in fp32
    with pytest.raises(
        UserError,
        match=r"rollout.bucket_bytes=4000 is too small for this model; it needs 4096 at least",
    ):
        reshard_plan(wide, Layout(2, 1), EngineRanks(), 4000, 4)
    assert reshard_plan(wide, Layout(2, 1), EngineRanks(), 4096, 4).peak_bytes <= 4096


def test_the_embedding_of_a_large_model_stays_in_the_bucket():
    """Qwen3-8B, TP 2 to TP 1: the embedding has 1187 MiB, the bucket 512."""
    arch = architecture(
        num_attention_heads=32,
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    made = reshard_plan(arch, Layout(2, 1), EngineRanks())
    assert made.peak_bytes <= 512 * 2**20
    assert (
        sum(entry.hf == "model.embed_tokens.weight" for b in made.buckets for entry in b.entries)
        == 3
    )
    assert made.received == made.least


def test_nothing_travels_when_layouts_nest():
    """Qwen3-8B's shapes, trainer and engine both TP 2, a vocabulary that both cut alike."""
    arch = architecture(vocab_size=512)
    assert reshard_plan(arch, Layout(2, 1), EngineRanks(2, 4), itemsize=2).received == (0, 0)
    assert reshard_plan(arch, Layout(1, 1), EngineRanks(4, 4), itemsize=2).received == (0,)
    assert (
        reshard_plan(arch, Layout(1, 2), EngineRanks()).least
        == reshard_plan(arch, Layout(1, 2), EngineRanks()).least_whole
    )


def test_tied_embedding_crosses_once():
    """Both stages hold a copy of it, so it stays; untied, the stages exchange embedding and output
    layer.
    """
    tied = reshard_plan(architecture(tied=True), Layout(1, 2), EngineRanks(), itemsize=4)
    assert not any("embed" in p.hf for b in tied.buckets for m in b.messages for p in m.ops)
    one_way = [
        p.hf
        for b in reshard_plan(architecture(), Layout(1, 2), EngineRanks()).buckets
        for m in b.messages
        for p in m.ops
    ]
    assert one_way.count("model.embed_tokens.weight") == one_way.count("lm_head.weight") == 1


def test_checksum_tells_plans_apart():
    arch = architecture()
    sums = [
        reshard_plan(arch, Layout(2, 1), EngineRanks(e), b).checksum
        for e in (1, 2)
        for b in (4000, 8000)
    ]
    assert len(set(sums)) == 4
    assert reshard_plan(arch, Layout(2, 1), EngineRanks(), 4000).checksum == sums[0]


@pytest.mark.parametrize(("tp", "what"), [(3, "attention heads"), (16, "attention heads")])
def test_engine_sizes_that_do_not_fit(tp, what):
    with pytest.raises(UserError, match=what):
        check_engine_size(architecture(), tp)
    with pytest.raises(UserError, match="neither divides"):
        check_engine_size(architecture(num_attention_heads=12, num_key_value_heads=4), 6)
    check_engine_size(architecture("qwen3_moe"), 4)
    with pytest.raises(UserError, match="=8 is more than the model's 4 experts"):
        check_engine_size(architecture("qwen3_moe"), 8)


def test_a_replica_that_hands_nothing_over_moves_nothing():
    """With servers only the replica of rank 0 takes part."""
    made = reshard_plan(architecture(), UNEVEN, EngineRanks(replicas=2, replica=1), only=())
    assert made.buckets == made.constants == ()
    assert made.received == made.least == (0, 0, 0, 0)
    assert made.peak_bytes == 0
