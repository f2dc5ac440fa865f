"""``dcpo sft`` as a user runs it: the numbers of plain PyTorch, every layout,
adapters that it goes on from.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, run, train

STEPS = 6
PER_STEP = 8
LR = 1e-3
FULL = pytest.mark.full  # for make test-full


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("sft") / "rows.jsonl")


def write_rows(path: Path) -> Path:
    """Demonstrations of different lengths, some of which count more than others."""
    chosen = random.Random(1)
    with path.open("w") as file:
        for line in (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:40]:
            problem = json.loads(line)
            confidence = chosen.randint(0, 100) / 100
            response = (
                f"{problem['answer'][::-1]} \\boxed{{{problem['answer']}}}\n"
                f"<conf> Confidence: {confidence:.2f}"
            )
            row = {"prompt": problem["problem"], "response": response}
            if chosen.random() < 0.3:
                row["weight"] = 0.5
            file.write(json.dumps(row) + "\n")
    return path


def options(rows: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        f"run_dir={run_dir}",
        f"data.path={rows}",
        f"data.examples_per_step={PER_STEP}",
        f"training.steps={STEPS}",
        "training.epochs=9",
        "training.micro_batch_size=3",
        f"optimizer.lr={LR}",
        "logging.to=[]",
        *more,
    ]


def sft(rows: Path, run_dir: Path, *more: str, processes: int = 1) -> list[dict[str, Any]]:
    done = run(
        "sft",
        "--config",
        QUICKSTART / "sft.yaml",
        *options(rows, run_dir, *more),
        processes=processes,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(run_dir)


@pytest.fixture(scope="module")
def finished(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one") / "run"
    sft(
        rows,
        directory,
        "data.shuffle=false",
        f"evaluation.path={rows}",
        "evaluation.interval=3",
        "training.save_interval=3",
    )
    return directory


def by_hand(rows: Path) -> tuple[list[float], dict[str, np.ndarray], float]:
    """Return the losses of plain PyTorch in the model of Hugging Face, its parameters at the end,
    and the mean loss of all rows at the end.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_dcpo.rollout.tokens import load_tokenizer

    tokenizer = load_tokenizer(QUICKSTART / "policy")
    model = AutoModelForCausalLM.from_pretrained(
        QUICKSTART / "policy", dtype=torch.float32, attn_implementation="eager"
    )
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    read = [json.loads(line) for line in rows.read_text().splitlines()]

    def nll(row: dict[str, Any]) -> tuple[torch.Tensor, float]:
        prompt = tokenizer.encode(row["prompt"])
        response = tokenizer.encode(row["response"], add_special_tokens=False)
        response = [*response, tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + response])).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(response)[:, None])
        weight = row.get("weight", 1.0)
        return -weight * chosen.sum(), weight * len(response)

    def mean(batch: list[dict[str, Any]]) -> torch.Tensor:
        sums, counts = zip(*map(nll, batch), strict=True)
        return torch.stack(sums).sum() / sum(counts)

    losses = []
    for step in range(STEPS):
        places = [(step * PER_STEP + i) % len(read) for i in range(PER_STEP)]
        loss = mean([read[place] for place in places])
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = mean(read).item()
    return (losses, {n: p.detach().numpy() for n, p in model.named_parameters()}, held_out)


def test_it_learns_what_plain_pytorch_learns(rows: Path, finished: Path) -> None:
    losses, parameters, held_out = by_hand(rows)
    logged = metrics(finished)
    assert [row["step"] for row in logged] == list(range(STEPS + 1))
    np.testing.assert_allclose([row["loss"] for row in logged[1:]], losses, rtol=1e-5)
    assert losses[0] > losses[-1]
    assert logged[-1]["evaluation/loss"] == pytest.approx(held_out, rel=1e-5)
    assert logged[0]["evaluation/loss"] > held_out
    exported = load_file(finished / "policy" / "model.safetensors")
    for name, values in exported.items():
        # Adam turns a gradient that is all rounding into a step of full size
        differs = np.abs(values - parameters[name]) > 2e-5
        assert differs.mean() < 0.01, name


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (1, ["parallel.sequence_packing=true"]),
        (
            2,
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=true",
                "parallel.sequence_packing=true",
            ],
        ),
        pytest.param(2, ["parallel.pipeline_model_parallel_size=2"], marks=FULL),
        pytest.param(2, ["parallel.context_parallel_size=2"], marks=FULL),
        pytest.param(2, ["parallel.use_distributed_optimizer=true"], marks=FULL),
    ],
)
def test_every_layout_learns_the_same(
    rows: Path, finished: Path, tmp_path: Path, processes: int, layout: list[str]
) -> None:
    expected = metrics(finished)
    logged = sft(
        rows,
        tmp_path / "run",
        "data.shuffle=false",
        f"evaluation.path={rows}",
        "evaluation.interval=3",
        *layout,
        processes=processes,
    )
    for key in ("loss", "grad_norm/total"):
        np.testing.assert_allclose(
            [row[key] for row in logged[1:]], [row[key] for row in expected[1:]], rtol=1e-4
        )
    assert logged[-1]["evaluation/loss"] == pytest.approx(expected[-1]["evaluation/loss"], rel=1e-5)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "changed",
    [
        "data.examples_per_step=4",
        pytest.param("data.shuffle=true", marks=FULL),
        pytest.param("seed=2", marks=FULL),
        "data.limit=30",
        "model.adapter.rank=4",
    ],
)
def test_another_run_is_not_resumed(rows: Path, finished: Path, changed: str) -> None:
    arguments = options(rows, finished, "data.shuffle=false", changed)
    before = digest(finished / "metrics.jsonl")
    done = run(
        "sft",
        "--config",
        QUICKSTART / "sft.yaml",
        *arguments,
        "training.resume=auto",
        "training.steps=9",
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") <= 8
    assert "Traceback" not in done.stderr
    assert digest(finished / "metrics.jsonl") == before


@pytest.fixture(scope="module")
def adapter(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter") / "run"
    sft(rows, directory, "model.adapter.rank=4", "optimizer.lr=0.02")
    return directory


def test_an_adapter_is_gone_on_from(rows: Path, adapter: Path, tmp_path: Path) -> None:
    """Both trainings start with the policy that the first one has left."""
    again = sft(
        rows,
        tmp_path / "again",
        f"model.adapter.path={adapter / 'adapter'}",
        f"evaluation.path={rows}",
        "evaluation.interval=3",
        "optimizer.lr=0.0",
    )
    merged = sft(
        rows,
        tmp_path / "merged",
        f"model.path={adapter / 'policy'}",
        f"evaluation.path={rows}",
        "evaluation.interval=3",
        "optimizer.lr=0.0",
    )
    assert again[0]["evaluation/loss"] == pytest.approx(merged[0]["evaluation/loss"], rel=1e-5)
    before = load_file(adapter / "adapter" / "adapter_model.safetensors")
    after = load_file(tmp_path / "again" / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(values, after[name], err_msg=name)
    rl = train(tmp_path / "rl", f"model.adapter.path={adapter / 'adapter'}", "training.steps=1")
    assert rl[0]["engine/logprob_diff_max"] < 1e-4, "the engine has the adapter, too"


def test_an_adapter_is_evaluated(adapter: Path, tmp_path: Path) -> None:
    """As the policy into which it was merged."""
    sampled = {}
    for name, model in {
        "base": ["--model", QUICKSTART / "policy"],
        "merged": ["--model", adapter / "policy"],
        "added": ["--model", QUICKSTART / "policy", "--adapter", adapter / "adapter"],
    }.items():
        done = run(
            "evaluate",
            *model,
            "--benchmarks",
            f"held={QUICKSTART / 'data' / 'heldout.jsonl'}",
            "--out",
            tmp_path / name,
            *["--template", "raw", "--limit", "12", "--repeats", "2", "--max-tokens", "32"],
            *["--engine", "transformers", "--resamples", "0"],
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        sampled[name] = [json.loads(line)["text"] for line in lines]
    assert sampled["added"] == sampled["merged"] != sampled["base"]
    evaluation = json.loads((tmp_path / "added" / "evaluation.json").read_text())
    assert str(adapter / "adapter") in evaluation["model"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["data.max_length=2"], "data.max_length"),
        (["rollout.group_size=8"], "rollout"),
        (["objective.name=cross_entropi"], "objective.name"),
        (["objective.name=nowhere.py:loss"], "objective.name"),
        (["evaluation.interval=2"], "evaluation.path"),
        (["training.updates_per_rollout=2"], "training.updates_per_rollout"),
        (["model.adapter.path=nowhere"], "nowhere"),
        (["model.adapter.path=nowhere", "model.adapter.rank=4"], "model.adapter.rank"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel"),
        (["data.template=nothing"], "nothing"),
        (["run_dir=/proc/new", "--dry-run"], "run_dir"),
    ],
)
def test_bad_input_is_one_line(
    rows: Path, tmp_path: Path, overrides: list[str], named: str
) -> None:
    done = run(
        "sft", "--config", QUICKSTART / "sft.yaml", *options(rows, tmp_path / "run", *overrides)
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert named in last
    assert "Traceback" not in done.stderr


def test_held_out_demonstrations_that_are_trained_are_counted(rows: Path, tmp_path: Path) -> None:
    """``data.limit`` bounds what is trained, and not what is held out, of one file as of two."""
    limited = ["data.limit=3", f"evaluation.path={rows}", "evaluation.interval=1", "--dry-run"]
    done = run("sft", "--config", QUICKSTART / "sft.yaml", *options(rows, tmp_path / "r", *limited))
    assert done.returncode == 0
    total = len(rows.read_text().splitlines())
    assert f"3 of {total}" in done.stderr
    assert f"data.examples_per_step={PER_STEP}" in done.stderr, "more than there are"
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line.strip())
    assert facts["demonstrations"] == "3"
    assert facts["held_out"] == str(total)


def test_a_loss_of_ones_own(rows: Path, tmp_path: Path) -> None:
    """A function of the user's in place of the cross-entropy: with its value, the same run."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(batch, outputs):\n"
        "    return -batch.columns['weights'] * outputs.logprobs, {}\n"
        "def broken(batch, outputs):\n"
        "    return batch.nothing, {}\n"
    )
    own = sft(rows, tmp_path / "own", f"objective.name={file}:loss")
    ours = sft(rows, tmp_path / "ours")
    assert [row["loss"] for row in own] == pytest.approx([row["loss"] for row in ours])
    done = run(
        "sft",
        "--config",
        QUICKSTART / "sft.yaml",
        *options(rows, tmp_path / "broken", f"objective.name={file}:broken"),
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr.splitlines()[-1]
