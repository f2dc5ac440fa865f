"""The plan of a weight synchronisation: every byte an engine rank lacks, once, and nothing else."""

import itertools
import math

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import parse_architecture
from megatron_dcpo.weights.engine_slices import check_engine, engine_slice
from megatron_dcpo.weights.planner import Coordinates, Layout, plan
from megatron_dcpo.weights.reshard_plan import reshard_plan
from megatron_dcpo.weights.table import hf_shapes

KINDS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def architecture(kind="qwen3", tied=False, **changes):
    config = {
        "architectures": [KINDS[kind]], "num_attention_heads": 8, "num_hidden_layers": 4, "hidden_size": 64,
        "intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 331,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
    }  # fmt: skip
    return parse_architecture(config | changes)


def cells(name, dim, start, stop):
    return {(name, dim, index) for index in range(start, stop)}


def held_by(arch, layout, rank):
    tensor, pipeline = rank % layout.tensor_model_parallel_size, rank // layout.tensor_model_parallel_size
    held = set()
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        for copy in plan(arch, layout, Coordinates(tensor, pipeline, virtual)):
            held |= cells(copy.hf, copy.dim, copy.hf_start, copy.hf_stop)
    return held


@pytest.mark.parametrize("engine_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(4, 1), Layout(1, 2, 2)]
)
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False), ("qwen2", True)])
def test_every_missing_byte_arrives_once(kind, tied, layout, replicas, engine_tp):
    """Counted index by index, by another way than the plan's: needed = held + received, and received not held."""
    arch = architecture(kind, tied)
    made = reshard_plan(arch, layout, engine_tp, replicas, bucket_bytes=4000, itemsize=4, replica=replicas - 1)
    shapes, (tp, pp) = hf_shapes(arch), (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size)
    assert made.received == made.least
    for rank in range(tp * pp):
        engine_rank = (rank % tp + tp * (replicas - 1 + replicas * (rank // tp))) % engine_tp
        needed, arrived, sent = set(), [], 0
        for name in shapes:
            needed |= cells(name, *engine_slice(arch, name, engine_tp, engine_rank))
        for message in itertools.chain.from_iterable(bucket.messages for bucket in made.buckets):
            for part in message.parts if rank in message.readers else ():
                arrived += sorted(cells(part.hf, part.dim, part.start, part.stop))
                sent += part.numel
        held = held_by(arch, layout, rank)
        assert len(arrived) == len(set(arrived)), "nothing twice"
        assert set(arrived) == needed - held, "all that is missing, and nothing else"
        assert made.received[rank] == 4 * sent
        lacking = sum(math.prod(shapes[name]) // shapes[name][dim] for name, dim, _ in needed - held)
        assert made.least[rank] == 4 * lacking


def test_owners_hold_what_they_send_and_every_tensor_is_in_one_bucket():
    arch, layout = architecture(tied=True), Layout(2, 2)
    made = reshard_plan(arch, layout, 1, 1, 4000, 4)
    assert [name for bucket in made.buckets for name in bucket.tensors] == list(hf_shapes(arch))
    for message in itertools.chain.from_iterable(bucket.messages for bucket in made.buckets):
        for part in message.parts:
            assert cells(part.hf, part.dim, part.start, part.stop) <= held_by(arch, layout, message.owner)


def test_modules_of_the_engine_are_never_torn():
    """vLLM keeps references until a module is complete: q, k, v and their biases together, gate and up together."""
    made = reshard_plan(architecture("qwen2"), Layout(2, 2), 1, 1, 2000, 4)
    where = {name: number for number, bucket in enumerate(made.buckets) for name in bucket.tensors}
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        attention = [f"{prefix}self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")]
        assert len({where[name] for name in attention}) == 1
        assert where[f"{prefix}mlp.gate_proj.weight"] == where[f"{prefix}mlp.up_proj.weight"]


@pytest.mark.parametrize("bucket_bytes", [2**12, 2**16, 2**20])
def test_peak_is_a_bucket_unless_a_module_is_larger(bucket_bytes):
    made = reshard_plan(architecture(vocab_size=640), Layout(2, 2), 1, 1, bucket_bytes, 4)
    assert made.message <= bucket_bytes // 8
    if made.oversize:
        shapes = hf_shapes(architecture(vocab_size=640))
        assert all("embed" in n or "lm_head" in n or "_proj" in n for n in made.oversize)
        assert made.assembled <= 4 * 2 * max(math.prod(shape) for shape in shapes.values())
    else:
        assert made.peak_bytes <= bucket_bytes


def test_nothing_travels_when_layouts_nest():
    """Qwen3-8B's shapes, trainer and engine both TP 2, a vocabulary that both cut alike."""
    arch = architecture(vocab_size=512)
    assert reshard_plan(arch, Layout(2, 1), 2, 4, itemsize=2).received == (0, 0)
    assert reshard_plan(arch, Layout(1, 1), 4, 4, itemsize=2).received == (0,)
    assert reshard_plan(arch, Layout(1, 2), 1, 1).least == reshard_plan(arch, Layout(1, 2), 1, 1).least_whole


def test_tied_embedding_crosses_once():
    """Both stages hold a copy of it, so it stays; untied, the stages exchange embedding and output layer."""
    tied = reshard_plan(architecture(tied=True), Layout(1, 2), 1, 1, itemsize=4)
    assert not any("embed" in p.hf for b in tied.buckets for m in b.messages for p in m.parts)
    one_way = [p.hf for b in reshard_plan(architecture(), Layout(1, 2)).buckets for m in b.messages for p in m.parts]
    assert one_way.count("model.embed_tokens.weight") == one_way.count("lm_head.weight") == 1


def test_checksum_tells_plans_apart():
    arch = architecture()
    sums = [reshard_plan(arch, Layout(2, 1), e, 1, b).checksum for e in (1, 2) for b in (4000, 8000)]
    assert len(set(sums)) == 4
    assert reshard_plan(arch, Layout(2, 1), 1, 1, 4000).checksum == sums[0]


@pytest.mark.parametrize(("tp", "what"), [(3, "attention heads"), (16, "attention heads")])
def test_engine_sizes_that_do_not_fit(tp, what):
    with pytest.raises(UserError, match=what):
        check_engine(architecture(), tp)
    with pytest.raises(UserError, match="neither divides"):
        check_engine(architecture(num_attention_heads=12, num_key_value_heads=4), 6)
