"""``dcpo plan``: known models by hand arithmetic, and every bad input named in one line."""

import argparse
import dataclasses
import json
import re

import pytest

from megatron_dcpo.architectures.config_json import parse_architecture
from megatron_dcpo.cli import main
from megatron_dcpo.cli.plan import add_parser
from megatron_dcpo.planning import memory
from megatron_dcpo.planning.machine import Machine, Rates
from megatron_dcpo.policy import output_layer
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.reshard_plan import EngineRanks, reshard_plan
from tests.helpers.paths import EXAMPLES
from tests.helpers.shipped import MODELS

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
}
TP, PP, VPP = (
    f"parallel.{name}_model_parallel_size"
    for name in ("tensor", "pipeline", "megatron.virtual_pipeline")
)


@pytest.fixture
def plan(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    config = str(EXAMPLES / "llama3.1_8b" / "math" / "dcpo.yaml")

    def run(gpus, *arguments, json_output=True):
        command = ["plan", "--config", config, "--gpus", str(gpus), f"model.path={tmp_path}"]
        status = main([*command, *(["--json"] if json_output else []), *arguments])
        out, err = capsys.readouterr()
        return status, json.loads(out) if json_output and status in (0, 3) else out, err

    return run


def test_70b_by_hand(plan):
    _, facts, _ = plan(64, f"{TP}=8", f"{PP}=4", "parallel.sequence_parallel=true")
    assert facts["parameters"] == 70_553_706_496
    # 20 layers of a rank, and on the first stage the embedding
    layer = (8192 * (64 + 2 * 8) * 128 + 8192 * 64 * 128 + 3 * 8192 * 28672) // 8 + 2 * 8192
    assert facts["stages"][0]["numel"] == 20 * layer + 129024 // 8 * 8192
    assert facts["stages"][1]["numel"] == 20 * layer
    assert [stage["micro_batches_in_flight"] for stage in facts["stages"]] == [4, 3, 2, 1]
    assert facts["stages"][0]["gradients"] == pytest.approx(
        4 * facts["stages"][0]["numel"], rel=1e-5
    )


def test_optimizer_state_shrinks_with_data_parallelism_and_activations_with_recomputation(plan):
    layout = (
        f"{TP}=8",
        f"{PP}=4",
        "parallel.sequence_parallel=true",
        "parallel.use_distributed_optimizer=true",
    )
    small, large = plan(64, *layout)[1], plan(4096, *layout)[1]
    assert large["layout"]["data_parallel_size"] == 128
    assert large["stages"][0]["moments"] == pytest.approx(
        small["stages"][0]["moments"] / 64, rel=0.01
    )
    assert large["stages"][0]["weights"] == pytest.approx(small["stages"][0]["weights"], rel=1e-4)
    kept = [
        plan(64, *layout, f"parallel.recompute_granularity={granularity}")[1]["stages"][0][
            "activations"
        ]
        for granularity in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > 2 * kept[2]


@pytest.mark.parametrize(
    ("gpus", "arguments", "engine", "replicas"),
    [
        (64, (f"{TP}=8", f"{PP}=4"), 8, 2),
        (8, (f"{TP}=4",), 2, 2),
        (16, (f"{TP}=2", f"{PP}=2", f"{VPP}=2"), 8, 4),  # engines over several replicas
        (8, (f"{TP}=1", "parallel.sequence_parallel=false"), 4, 8),  # every rank has all
    ],
)
def test_resharding_is_what_the_synchronization_moves(plan, gpus, arguments, engine, replicas):
    shape = (
        "rollout.engine=vllm",
        f"rollout.tensor_model_parallel_size={engine}",
        "model.params_dtype=bf16",
    )
    status, facts, err = plan(gpus, *arguments, *shape)
    assert status in (0, 3), err
    layout = Layout(**{k: v for k, v in facts["layout"].items() if k != "data_parallel_size"})
    assert facts["layout"]["data_parallel_size"] == replicas
    arch = parse_architecture(LLAMA_70B)
    made = [
        reshard_plan(arch, layout, EngineRanks(engine, replicas, i), itemsize=2)
        for i in range(replicas)
    ]
    assert facts["resharding_bytes"] == max(max(one.received) for one in made)


@pytest.mark.parametrize("engine", [(), ("rollout.engine=server", "rollout.endpoint=http://h/v1")])
def test_an_engine_in_fp8_has_a_byte_for_a_weight_of_a_linear_layer(plan, engine):
    """Its cache has what it saves; keys and values stay in bf16."""
    layout = (f"{TP}=8", f"{PP}=4", "parallel.sequence_parallel=true", *engine)
    size = "rollout.tensor_model_parallel_size=8"
    gpus = ("--engine-gpus", "64") if engine else ()
    fp8 = "rollout.vllm.quantization=fp8_per_block"
    plain = plan(64, *gpus, *layout, size)[1]["engine"]
    quantized = plan(64, *gpus, *layout, size, fp8)[1]["engine"]
    linear = 80 * (8192 * (2 * 64 + 2 * 8) * 128 + 3 * 8192 * 28672)
    assert plain["weights"] == 2 * 70_553_706_496 // 8
    assert plain["weights"] - quantized["weights"] == linear // 8
    assert quantized["kv_cache"] - plain["kv_cache"] == linear // 8
    assert quantized["kv_per_token"] == plain["kv_per_token"]


def test_a_plan_that_does_not_fit_says_so(plan):
    greedy = (
        "parallel.sequence_parallel=false",
        "parallel.recompute_granularity=none",
        "rollout.gpu_memory_utilization=0.9",
    )
    status, text, _ = plan(64, f"{TP}=8", f"{PP}=4", *greedy, json_output=False)
    assert status == 3
    assert "does not fit" in text
    assert "Assumed: 989 TFLOP/s" in text
    facts = plan(64, f"{TP}=8", f"{PP}=4", "--gpu-memory-gb", "100000")[1]
    assert facts["fits"]


@pytest.mark.parametrize(
    ("gpus", "arguments", "message"),
    [
        (12, [f"{TP}=8"], "does not divide the 12 process(es)"),
        (8192, [], "--gpus 8192 is outside 1 ... 4096"),
        (48, [f"{TP}=6"], "does not divide the model's 64 attention heads"),
        (64, [f"{TP}=16"], "does not divide the model's 8 query groups"),
        (9, [f"{PP}=3"], "does not divide the model's 80 layers"),
        (8, ["--response-tokens", "999999"], "--response-tokens 999999 is outside"),
        (8, ["--mfu", "2"], "--mfu 2 is above 1"),
        (8, ["--reserve-gb", "90"], "--reserve-gb 90 is outside"),
        (8, ["model.path=/no/such/model"], "/no/such/model does not exist"),
        (8, ["parallel.tensor=1"], "unknown key parallel.tensor"),
    ],
)
def test_bad_input_is_one_line(plan, gpus, arguments, message):
    status, _, err = plan(gpus, *arguments)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_the_output_layer_is_planned_as_it_works(plan):
    """The planner does not import the policy; its constant is the output layer's, and [tokens,
    vocabulary] is nowhere.
    """
    assert memory.LOGITS_AT_ONCE == output_layer.LOGITS_AT_ONCE
    _, facts, _ = plan(64, f"{TP}=8", f"{PP}=4")
    rows = facts["tokens_per_micro_batch"]
    chunk = min(memory.LOGITS_AT_ONCE, rows * 129024 // 8)
    assert facts["stages"][-1]["logits"] <= 6 * chunk + 3 * 2 * 8192 * rows
    assert [stage["logits"] for stage in facts["stages"][:-1]] == [0, 0, 0]


def test_a_frozen_policy_has_weights_and_an_adapter(plan):
    """Rank 8 on two of the projections of the 70B: 80 layers of [8192, 8192] and [1024, 8192]."""
    layout = (f"{TP}=8", "parallel.sequence_parallel=true", "parallel.recompute_granularity=full")
    options = ("model.adapter.rank=8", "model.adapter.targets=[q_proj,v_proj]")
    frozen, trained = (plan(8, *layout, *more)[1]["stages"][0] for more in (options, ()))
    assert frozen["adapter"] == 16 * 80 * 8 * (8192 + 8192 + 1024 + 8192)
    assert frozen["weights"] == 2 * frozen["numel"]
    assert frozen["numel"] == trained["numel"]
    assert (
        frozen["gradients"],
        frozen["main_params"],
        frozen["moments"],
        frozen["host_copies"],
    ) == (0, 0, 0, 0)
    assert frozen["buffer_numel"] == frozen["adapter"] // 16
    assert frozen["activations"] == pytest.approx(trained["activations"], rel=0.1)
    assert trained["total"] - frozen["total"] > 15 * frozen["numel"]
    with_kl = plan(8, *layout, *options, "objective.kl_coef=0.01")[1]["stages"][0]
    assert with_kl["reference_policy"] == 0


def test_layers_of_every_stage_are_shown(capsys):
    """40 layers on 8 stages, fewer where the output layer is: the time of the slowest stage falls,
    nothing else changes.
    """
    config, model = (str(EXAMPLES / "qwen3_14b" / "math" / "dcpo.yaml"), MODELS / "Qwen/Qwen3-14B")
    command = [
        "plan",
        "--config",
        config,
        "--gpus",
        "64",
        f"model.path={model}",
        f"{PP}=8",
        f"{TP}=4",
    ]
    written = "parallel.megatron.pipeline_model_parallel_layout=Et*5|(t*5|)*4(t*6|)*2t*3L"
    found = {}
    for name, options in (("even", []), ("uneven", [written])):
        assert main([*command, *options]) == 0
        assert (
            f"{'-'.join('5' * 8) if name == 'even' else '5-5-5-5-5-6-6-3'} layers"
            in capsys.readouterr().out
        )
        assert main([*command, *options, "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    even, uneven = found["even"], found["uneven"]
    assert [stage["layers"] for stage in uneven["stages"]] == [5, 5, 5, 5, 5, 6, 6, 3]
    assert sum(stage["numel"] for stage in uneven["stages"]) == sum(
        stage["numel"] for stage in even["stages"]
    )
    layer = even["stages"][1]["numel"] // 5
    numel = [stage["numel"] for stage in uneven["stages"]]
    assert [b - a for a, b in zip([s["numel"] for s in even["stages"]], numel, strict=True)] == [
        *[0] * 5,
        layer,
        layer,
        -2 * layer,
    ]
    # work: 6 layers against 5 and the output layer, which is 2.1 layers' (attention over 4,024
    # tokens counted)
    q, k, h = 40 * 128, 8 * 128, 5120
    flops = 2 * (h * (q + 2 * k) + q * h + 3 * h * 17408) + 2 * q * 4024
    slowest = 6 * flops / (5 * flops + 2 * h * 152064)
    assert uneven["step_seconds"]["update"] / even["step_seconds"]["update"] == pytest.approx(
        slowest, rel=1e-6
    )


@pytest.mark.parametrize(
    ("name", "gpus", "tp", "cp", "recompute"),
    [
        ("Qwen3-8B", 8, 2, 4, "none"),
        ("Qwen3-8B", 64, 2, 4, "none"),
        ("Qwen3-14B", 8, 4, 2, "full"),
        ("Qwen3-14B", 64, 4, 2, "none"),
    ],
)
def test_responses_of_32k_fit_with_context_parallelism(capsys, name, gpus, tp, cp, recompute):
    """Each rank has 1 / CP of a sequence's activations, and all of weights and optimizer state."""
    family = name.lower().replace("-", "_")
    config, model = (str(EXAMPLES / family / "math" / "dcpo.yaml"), MODELS / "Qwen" / name)
    long = ["rollout.max_response_length=32768", "training.max_tokens_per_micro_batch=33792"]
    facts = []
    for size in (1, cp):
        layout = [
            f"{TP}={tp}",
            f"parallel.context_parallel_size={size}",
            f"parallel.recompute_granularity={recompute}",
        ]
        command = [
            "plan",
            "--config",
            config,
            "--gpus",
            str(gpus),
            f"model.path={model}",
            *long,
            *layout,
            "--json",
        ]
        status = main(command)
        facts.append(json.loads(capsys.readouterr().out))
        assert status == (0 if facts[-1]["fits"] else 3)
    without, context = facts
    assert context["fits"]
    assert without["fits"] == (recompute == "full")
    assert context["tokens_per_micro_batch"] == 33792
    assert context["layout"]["data_parallel_size"] * cp == without["layout"]["data_parallel_size"]
    ours, theirs = context["stages"][0], without["stages"][0]
    assert [ours[key] for key in ("weights", "gradients", "moments")] == [
        theirs[key] for key in ("weights", "gradients", "moments")
    ]
    assert ours["activations"] == pytest.approx(theirs["activations"] / cp, rel=1e-6)
    assert context["resharding_bytes"] == without["resharding_bytes"]
    # a ring of (CP - 1) sends of the rank's keys and values; forward, backward (with gradients),
    # recomputed, log-prob pass
    layers, tokens = (36 if name == "Qwen3-8B" else 40), 2048 * 33792 / (gpus / tp)
    sent = (cp - 1) * tokens * 2 * 8 // tp * 128 * 2 * layers * (1 + 3 + (recompute == "full"))
    assert context["bytes_sent_per_step"]["context_parallel"] == pytest.approx(sent, rel=1e-6)
    assert without["bytes_sent_per_step"]["context_parallel"] == 0


def test_this_machine_without_gpus(capsys):
    """No number of GPUs: one process of the CPU, the embedded engine, one memory for host and
    device, measured rates.
    """
    command = [
        "plan",
        "--config",
        str(EXAMPLES / "quickstart" / "dcpo.yaml"),
        f"model.path={EXAMPLES / 'quickstart/policy'}",
    ]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gpus"] == 1
    assert facts["engine"]["kind"] == "transformers"
    assert facts["step_seconds"]["total"] > 0
    assert facts["peak_bytes"] > 1e9
    assert facts["gpu_memory_bytes"] < 1e13
    assert main([*command, f"{PP}=2"]) == 0
    shown = capsys.readouterr().out
    assert "on 2 process(es) of this CPU" in shown
    assert "Measured here" in shown
    assert "On the host" not in shown


def test_engines_on_gpus_of_their_own(tmp_path, capsys):
    """Their memory is not the trainer's; an overlapped step is as long as its longer half."""
    options = [
        "--config",
        str(EXAMPLES / "qwen3_8b" / "math" / "dcpo_async.yaml"),
        f"model.path={MODELS}/Qwen/Qwen3-8B",
    ]

    def run(*more):
        assert main(["plan", *options, "--gpus", "8", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    alone, both = run(), run("--engine-gpus", "8")
    assert (alone["engine_gpus"], alone["engine"]["weights"]) == (0, 0)
    engine, seconds = both["engine"], both["step_seconds"]
    assert engine["weights"] == both["parameters"] * 2
    assert engine["weights"] + engine["kv_cache"] == pytest.approx(0.9 * 80e9)
    assert (
        both["rollout_bytes"]
        == max(stage["resting"] for stage in both["stages"])
        == alone["rollout_bytes"]
    )
    rest = seconds["total"] - seconds["beside_training"]
    assert rest == pytest.approx(
        min(seconds["rollout"], seconds["total"] - seconds["rollout"] - seconds["resharding"])
    )
    assert (alone["resharding_bytes"], both["resharding_bytes"]) == (0, both["parameters"] * 2), (
        "a broadcast of all"
    )
    assert seconds["resharding"] == pytest.approx(both["resharding_bytes"] / 50e9), (
        "to another node"
    )
    servers = 'rollout.endpoint=["http://a:8000/v1", "http://b:8000/v1"]'
    two = run("--engine-gpus", "8", servers)
    assert two["resharding_bytes"] == 2 * both["resharding_bytes"], "to the group of each server"
    files = run("--engine-gpus", "8", servers, "rollout.weight_transfer=files")
    assert files["resharding_bytes"] == both["resharding_bytes"], "all read the same directory"
    half = run("--engine-gpus", "4")["step_seconds"]["rollout"]
    assert 1.5 * seconds["rollout"] < half < 2.5 * seconds["rollout"]
    assert main(["plan", *options, "--gpus", "8", "--engine-gpus", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "DP 8 x TP 1, each GPU 16.38 GB of weights" in shown
    assert "(rollout.max_staleness)" in shown
    assert "engine weights" not in shown
    two = "rollout.tensor_model_parallel_size=2"
    assert run("--engine-gpus", "8", two)["engine"]["weights"] == both["parameters"]
    assert main(["plan", *options, "--gpus", "8", "--engine-gpus", "7", two]) == 2
    refusal = capsys.readouterr().err
    assert "rollout.tensor_model_parallel_size=2" in refusal
    assert "--engine-gpus" in refusal
    both_nodes = "rollout.endpoint=http://a/v1,http://b/v1"
    assert run("--engine-gpus", "4", two, both_nodes)["engine_gpus"] == 4
    for engines in ("5", "6"):  # not two servers; three GPUs each
        more = ["--gpus", "8", "--engine-gpus", engines, two, both_nodes]
        assert main(["plan", *options, *more]) == 2
        assert "--engine-gpus" in capsys.readouterr().err
    assert main(["plan", *options, "--gpus", "2", both_nodes, "rollout.endpoint=a,b,c"]) == 2
    assert "rollout.endpoint" in capsys.readouterr().err
    little = "rollout.gpu_memory_utilization=0.2"
    planned = ["plan", *options, "--gpus", "8", "--engine-gpus", "8", little, "--json"]
    assert main(planned) == 3, "16.4 GB of weights in 16 GB"
    facts = json.loads(capsys.readouterr().out)
    assert not facts["fits"]
    assert main([*planned, two]) == 0
    capsys.readouterr()
    elsewhere = [*options[:1], str(EXAMPLES / "qwen3_8b" / "math" / "dcpo.yaml"), options[2]]
    assert main(["plan", *elsewhere, "--gpus", "8", "--engine-gpus", "8"]) == 2
    assert "--engine-gpus is for rollout.engine=server, not auto" in capsys.readouterr().err


@pytest.mark.parametrize(("engines", "too_long"), [("8", False), ("2", True)])
def test_a_rollout_longer_than_a_request_may_take_is_said(capsys, engines, too_long):
    long = ("rollout.max_response_length=32768", f"model.path={MODELS}/Qwen/Qwen3-8B")
    config = EXAMPLES / "qwen3_8b" / "math" / "dcpo_async.yaml"
    options = ["--config", str(config), "--gpus", "8", "--engine-gpus", engines]
    main(["plan", *options, *long])
    shown = capsys.readouterr().out
    assert ("data.prompts_per_step" in shown) == too_long


def test_the_engines_log_probs_as_old_ones_are_a_pass_less(plan):
    two, none = "training.updates_per_rollout=2", "objective.tis_level=none"
    by_trainer, by_engine = (
        plan(64, f"{TP}=8", f"{PP}=4", two, none, f"objective.old_logprobs={who}")[1]
        for who in ("trainer", "engine")
    )
    assert by_trainer["step_seconds"]["forward"] > by_engine["step_seconds"]["forward"] == 0
    assert by_trainer["step_seconds"]["update"] == by_engine["step_seconds"]["update"]


def test_the_help_states_the_defaults_that_are_used():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    (verbs,) = parser._subparsers._group_actions
    stated = {}
    for action in verbs.choices["plan"]._actions:
        found = re.search(r"default ([\d.]+)", action.help or "")
        if found:
            stated[action.dest] = float(found[1])
    used = {}
    for kind in (Machine, Rates):
        used |= {field.name: field.default for field in dataclasses.fields(kind)}
    assert len(stated) == 8
    assert stated == {name: used[name] for name in stated}
