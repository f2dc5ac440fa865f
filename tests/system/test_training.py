"""``dcpo train`` as a user runs it: on the quickstart's policy, on real text, over two ranks."""

import fcntl
import json

import numpy as np
import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, run, train


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("three") / "run"
    return run_dir, train(run_dir, "training.steps=3", "training.save_interval=1")


def test_run_directory_holds_what_the_design_promises(three_steps):
    run_dir, records = three_steps
    assert [record["step"] for record in records] == [1, 2, 3]
    expected = {
        "reward/accuracy",
        "reward/calibration",
        "confidence/mean",
        "confidence/std",
        "format/violation_rate",
        "format/no_answer",
        "calibration/ece",
        "calibration/pce",
        "calibration/brier",
        "calibration/auroc",
        "length/mean",
        "loss/policy",
        "loss/clip_fraction",
        "grad_norm/total",
        "engine/kl",
        "engine/logprob_diff_max",
        "tokens/s/rollout",
        "tokens/s/train",
        "time/rollout",
        "time/judge",
        "time/train",
        "time/reshard",
    }
    assert expected <= set(records[0])
    assert all(record["engine/logprob_diff_max"] <= 1e-4 for record in records)
    assert (run_dir / "config.yaml").is_file()
    assert (run_dir / "samples" / "step_000001.jsonl").is_file()
    assert (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(p.name for p in (run_dir / "checkpoints").glob("iter_*")) == [
        "iter_0000002",
        "iter_0000003",
    ]


def test_every_metric_is_on_the_page_of_metrics(three_steps):
    """A row names ``a/b``, or ``/b`` beside another of its family; families with names of a model
    or phase by prefix.
    """
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    families = ("format/", "time/", "memory/", "grad_cosine", "evaluation/")
    for name in three_steps[1][0].keys() - {"step"}:
        stem = name.removesuffix("_reasoning").removesuffix("_confidence")
        family, _, last = stem.rpartition("/")
        beside = f"`{family}/" in page and (
            f"`/{last}`" in page or f"`_{last.rpartition('_')[2]}`" in page
        )
        assert f"`{stem}`" in page or beside or name.startswith(families), (
            f"docs/metrics.md lacks {name}"
        )


def test_trained_policy_loads_in_transformers(three_steps):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, _ = three_steps
    model = AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy")
    out = model.generate(
        **tokenizer("3*7=", return_tensors="pt"), max_new_tokens=24, do_sample=False
    )
    assert "\\boxed{" in tokenizer.decode(out[0])


@pytest.mark.parametrize(
    "option",
    [
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=2",
        "use_distributed_optimizer=true",
    ],
)
def test_two_ranks_equal_one(three_steps, tmp_path, option):
    """Sampling is counted per response, so all layouts train on the same responses and must agree
    on everything.
    """
    records = train(tmp_path / "run", "training.steps=3", f"parallel.{option}", processes=2)
    for ours, single in zip(records, three_steps[1], strict=True):
        assert ours["reward/accuracy"] == single["reward/accuracy"], "the same sampled responses"
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-5)
        assert ours["grad_norm/total"] == pytest.approx(single["grad_norm/total"], rel=1e-4)
        assert ours["engine/logprob_diff_max"] <= 1e-4


def test_several_updates_per_rollout_clip_against_the_rollout_policy(tmp_path):
    records = train(
        tmp_path / "run", "training.steps=2", "training.updates_per_rollout=4", "optimizer.lr=1e-3"
    )
    assert records[1]["loss/clip_fraction"] > 0
    assert records[1]["engine/logprob_diff_max"] <= 1e-4, (
        "old log-probs are those of the policy that sampled"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("objective.name=grpo",),
        pytest.param(("objective.preset=dcpo_proper",), marks=pytest.mark.full),
        ("objective.preset=dcpo_proper", "training.updates_per_rollout=2"),
        ("objective.name=coupled",),
        ("objective.name=rlcr", "objective.variant=original"),
        ("objective.name=ccgspg",),
        ("objective.name=posthoc",),
        (
            "objective.ratio=sequence",
            "objective.overlong_buffer=8",
            "training.updates_per_rollout=2",
        ),
        (
            "objective.clip=cispo",
            "objective.loss_aggregation=constant",
            "training.updates_per_rollout=2",
        ),
        ("objective.kl_coef=0.1", "objective.entropy_coef=0.01", "training.updates_per_rollout=2"),
        (
            "objective.tis_level=sequence",
            "objective.preset=verl_compat",
            "parallel.sequence_packing=true",
        ),
    ],
    ids=lambda overrides: "-".join(o.split(".")[1] for o in overrides),
)
def test_every_method_trains(tmp_path, overrides):
    records = train(tmp_path / "run", "training.steps=2", "training.save_interval=0", *overrides)
    assert all(
        np.isfinite(record["loss/policy"]) and np.isfinite(record["grad_norm/total"])
        for record in records
    )
    assert records[0]["grad_norm/total"] > 0


def test_resume_none_does_not_overwrite(three_steps):
    done = run("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={three_steps[0]}", *SMALL)
    assert done.returncode == 2
    assert "--resume auto" in done.stderr


def test_a_second_training_in_the_same_run_directory_is_refused(three_steps):
    run_dir, _ = three_steps
    before = (run_dir / "metrics.jsonl").read_bytes()
    with (run_dir / "lock").open("r+") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        arguments = (
            "train",
            "--config",
            QUICKSTART / "dcpo.yaml",
            f"run_dir={run_dir}",
            *SMALL,
            "--resume",
            "auto",
        )
        done = run(*arguments, "training.steps=4", processes=2)
    assert done.returncode != 0
    assert "dcpo train: error: another training is running in" in done.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.full
def test_real_text(tmp_path, shared_data):
    """A tiny random Qwen3 with the real Qwen vocabulary trains two steps on DeepScaleR with the
    paper's prompt.
    """
    model = tmp_path / "model"
    make_tiny_qwen(model, shared_data / "qwen_tokenizer")
    data = shared_data / "deepscaler_uniform" / "deepscaler_uniform_train.parquet"
    records = train(
        tmp_path / "run",
        f"model.path={model}",
        f"data.path={data}",
        "data.template=paper",
        "data.prompts_per_step=2",
        "data.max_prompt_length=1024",
        "data.limit=64",
        "rollout.group_size=2",
        "rollout.max_response_length=24",
        "training.steps=2",
    )
    assert len(records) == 2
    assert all(record["engine/logprob_diff_max"] <= 1e-4 for record in records)
    benchmarks = (
        f"math500={shared_data / 'math500' / 'test.jsonl'},"
        f"aime24={shared_data / 'aime24' / 'aime24.parquet'}"
    )
    options = (
        "--benchmarks",
        benchmarks,
        "--limit",
        "3",
        "--repeats",
        "2",
        "--max-tokens",
        "16",
        "--resamples",
        "0",
    )
    options += ("--engine", "transformers")
    done = run(
        "evaluate",
        "--model",
        tmp_path / "run" / "policy",
        *options,
        "--out",
        tmp_path / "eval",
        "--json",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    evaluation = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert set(evaluation["benchmarks"]) == {"math500", "aime24"}
    assert evaluation["benchmarks"]["math500"]["n"] == 6


def make_tiny_qwen(path, tokenizer_dir):
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=151_645,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.lamda=0.5"], "unknown key objective.lamda; did you mean objective.lam?"),
        (
            ["parallel.tensor_parallel_size=2"],
            "did you mean parallel.tensor_model_parallel_size?",
        ),
        (["lr=1e-4"], "did you mean optimizer.lr?"),
        (["optimizer.lr=fast"], "optimizer.lr"),
        (["training.steps=0"], "training.steps"),
        (["objective.name=dpco"], "dcpo"),
        (["model.path=/nowhere"], "model directory /nowhere does not exist"),
        (["data.path=/nowhere.jsonl"], "/nowhere.jsonl"),
        (
            ["parallel.tensor_model_parallel_size=3"],
            "tensor_model_parallel_size=3 does not divide the model's",
        ),
        (["parallel.pipeline_model_parallel_size=3"], "pipeline_model_parallel_size=3"),
        (["parallel.sequence_parallel=true"], "sequence_parallel needs"),
        (["nonsense"], "not of the form section.key=value"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, overrides, message):
    done = run(
        "train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}", *overrides
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert (
        len([line for line in done.stderr.splitlines() if line.startswith("dcpo train: error:")])
        == 1
    )
    assert not (tmp_path / "run").exists()


def test_broken_data_line_is_named(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"problem": "1*1=", "answer": "1"}\n{"problem": \n')
    done = run(
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={tmp_path / 'run'}",
        f"data.path={data}",
    )
    assert done.returncode == 2
    assert f"{data}:2" in done.stderr
    assert "Traceback" not in done.stderr
