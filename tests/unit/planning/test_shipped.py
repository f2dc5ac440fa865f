"""Every shipped configuration fits the machine that the documentation names, by ``dcpo plan``."""

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.machine import Machine
from megatron_dcpo.planning.plan import make_plan
from megatron_dcpo.planning.plan_tables import reshard_facts, reshard_lines
from tests.helpers.paths import EXAMPLES
from tests.helpers.shipped import FAMILIES, MODELS, SHIPPED, model_of

GPUS = {  # the others: (8,)
    "qwen3_32b": (8, 64, 512),
    "qwen3_30b_a3b": (8, 64, 512),
    "llama3.1_70b": (32, 64, 512),
    "llama3.1_70b/math/dcpo_lora": (8, 64, 512),
    "qwen3_8b/math/dcpo_thinking": (16, 64),
    "qwen3_8b/math/dcpo_thinking_all_gather": (16, 64),
    "qwen3_14b/math/dcpo_pipeline": (16, 64),
    "qwen3_32b/math/dcpo_overlap": (64, 512),
}
LARGE = [path for path in SHIPPED if path.parent.name in ("math", "code")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_fits_gpus_of_80_gb(path):
    family = path.relative_to(EXAMPLES).parts[0]
    model = model_of(path)
    for gpus in GPUS.get(str(path.relative_to(EXAMPLES).with_suffix("")), GPUS.get(family, (8,))):
        plan = make_plan(load_config(path, [f"model.path={model}"]), Machine(gpus=gpus))
        assert plan.machine.reserve_gb >= 5
        assert plan.fits, f"{plan.peak / 1e9:.1f} GB on {gpus} GPUs"
        assert max(stage.total for stage in plan.stages) <= 75e9
        assert plan.saving_bytes <= plan.largest.total, "a save never needs more than an update"


def test_the_messages_to_a_server_are_counted():
    path, model = (EXAMPLES / "qwen3_8b" / "math" / "dcpo_async.yaml", MODELS / "Qwen/Qwen3-8B")

    def planned(*options):
        return reshard_facts(load_config(path, [f"model.path={model}", *options]), 8)

    facts = planned()
    assert facts["to_each_server"]["messages"] == 74
    assert "74 broadcasts" in "\n".join(reshard_lines(facts))
    by_files = planned("rollout.weight_transfer=files")
    assert by_files["to_each_server"] is None
    assert "broadcasts" not in "\n".join(reshard_lines(by_files))


def test_the_large_ones_are_all_here():
    assert len(LARGE) == 63
    for path in LARGE:
        family, name = path.relative_to(EXAMPLES).parts[0], load_config(path).model.path
        assert name.startswith("runs/") or name == FAMILIES[family]


def test_thinking_of_32k_needs_the_sequence_divided_or_recomputation():
    path, model = (EXAMPLES / "qwen3_8b" / "math" / "dcpo_thinking.yaml", MODELS / "Qwen/Qwen3-8B")

    def planned(*options):
        return make_plan(load_config(path, [f"model.path={model}", *options]), Machine(gpus=16))

    whole = planned("parallel.context_parallel_size=1")
    assert planned().tokens_per_micro_batch == whole.tokens_per_micro_batch == 1024 + 32768
    assert not whole.fits
    assert planned("parallel.context_parallel_size=1", "parallel.recompute_granularity=full").fits


def test_an_adapter_with_experts_is_refused_as_in_training():
    path, model = (
        EXAMPLES / "qwen3_30b_a3b" / "math" / "dcpo.yaml",
        MODELS / FAMILIES["qwen3_30b_a3b"],
    )
    config = load_config(path, [f"model.path={model}", "model.adapter.rank=16"])
    for refused in (lambda: make_plan(config, Machine(gpus=8)), lambda: reshard_facts(config, 8)):
        with pytest.raises(UserError, match=r"model\.adapter.*experts"):
            refused()


def test_what_leaves_the_device_for_a_rollout_makes_room_and_is_on_the_host():
    path, model = (EXAMPLES / "qwen3_8b" / "math" / "verl_compat.yaml", MODELS / "Qwen/Qwen3-8B")
    with_offload, without = (
        make_plan(
            load_config(
                path, [f"model.path={model}", f"training.offload_optimizer_during_rollout={wanted}"]
            ),
            Machine(gpus=8),
        )
        for wanted in (True, False)
    )
    state = without.largest.state
    moved = state.main_params + state.moments
    assert without.rollout_bytes - with_offload.rollout_bytes == moved + state.gradients
    assert with_offload.largest.host_copies - without.largest.host_copies == moved
    assert with_offload.largest.total == without.largest.total
    # the reference policy: on the host but for its pass, so that no rollout pays for it
    assert (
        with_offload.rollout_bytes
        == state.weights + with_offload.engine.weights + with_offload.engine.kv_cache
    )
    assert with_offload.largest.reference == pytest.approx(8.19e9, rel=1e-2)
    # each of 4 replicas writes its own 12 bytes per parameter of its shard, and its part of the
    # weights
    assert with_offload.largest.saved == pytest.approx((12 / 4 + 2 / 4) * 4.096e9, rel=1e-2)
    assert with_offload.host_bytes == 8 * (
        with_offload.largest.host_copies + with_offload.largest.saved
    )
