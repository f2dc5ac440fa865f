"""What a language model says it knows: stated, looked up, fitted and taught confidences of frozen
policies of SmolLM2-135M-Instruct.

The study is ``docs/lab/language_model.md``, whose design was committed before the first run of an
arm. The policies start from a warm start with LoRA on the tasks of ``examples/smollm2``
(:data:`WARM_START` under ``--grid``; the page has its commands) and are trained by GRPO with LoRA.
No problem is in two of the files that :func:`write_problems` makes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.confidences import (
    ADAPTERS,
    SHUFFLED,
    Study,
    answer,
    dcpo,
    fit_arms,
    note_start,
    packed_seeds,
    trained,
)
from lab.testgrid import REPOSITORY
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Sample, read_samples
from megatron_dcpo.runtime.files import write_atomically

logger = logging.getLogger(__name__)

SMOLLM2 = REPOSITORY / "examples" / "smollm2"
WARM_START = "warm_start/policy"
TAUGHT = "adapter, taught by the stack"
MAY_FALL = 0.05  # accuracy in sums of a policy below the warm start's
# rows of data/train.jsonl: trained by GRPO, answered to fit, answered to test
ROWS = {"reinforce": (0, 2000), "fit": (2000, 5000), "test": (5000, 6000)}
REINFORCE = (
    "model.params_dtype=bf16",
    "model.adapter.rank=16",
    "model.adapter.alpha=32",
    "optimizer.lr=2e-4",
    "rollout.filter_groups=reasoning",
    "training.steps=20",
    "training.save_interval=5",
    "training.keep_checkpoints=1",
    "evaluation.interval=0",
)
SAMPLING = (
    *("--template", "chat", "--repeats", 1, "--max-tokens", 72, "--batch-size", 64),
    *("--temperature", 1.0, "--top-p", 1.0, "--top-k", 0),
    "model.params_dtype=bf16",
)
STUDY = Study(
    name="language_model",
    verb="language-model",
    title="a language model says what it knows",
    compared=(
        *(name for name in ADAPTERS if name != SHUFFLED),
        f"{TAUGHT}, greedy",
        "probe",
        "stack",
        "boosted trees",
    ),
    against=("lookup", "bar", "adapter, T = R", "probe", TAUGHT),
    seeds=(1, 2, 3),
    fitting=(
        "--decimals",
        "1",
        "model.adapter.rank=16",
        "model.adapter.layers=last 6",
        "model.params_dtype=bf16",
        "optimizer.lr=5e-4",
        "training.epochs=2",
        "data.examples_per_step=32",
        "parallel.sequence_packing=true",
        "training.max_tokens_per_micro_batch=2048",
        "logging.to=[]",
    ),
    reading=("model.params_dtype=bf16",),
    read_greedily=(TAUGHT,),
    tests=("test", "other"),
    said="said_test",
)
# of the training on the policy's own answers with the numbers of TAUGHT
SAYING = (
    "model.params_dtype=bf16",
    "model.adapter.rank=16",
    "model.adapter.alpha=32",
    "optimizer.lr=2e-4",
    "optimizer.lr_warmup_iters=5",
    "training.epochs=1",
    "training.save_interval=25",
)


def write_problems(data: Path, out: Path) -> dict[str, Path]:
    """Write the problems of each part, from the files of ``tasks.py`` in ``data``; return where
    they are.
    """
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    out.mkdir(parents=True, exist_ok=True)
    files = {"other": data / "out_of_distribution.jsonl"}
    for name, (first, last) in ROWS.items():
        files[name] = out / f"{name}.jsonl"
        write_atomically(files[name], "".join(lines[first:last]))
    return files


def train(out: Path, records: Path) -> None:
    """Train the policies below ``out``, sample them, and fit and read the arms; finished parts are
    kept, and seeds that ``records`` have are left out. A policy whose accuracy in sums has fallen
    is not fitted, and a line says so.
    """
    packed = packed_seeds(STUDY, records)
    missing = [seed for seed in STUDY.seeds if seed not in packed]
    if not missing:
        return
    start = out / WARM_START
    if not start.is_dir():
        raise UserError(f"{start} is missing: docs/lab/language_model.md has the warm start")
    files = write_problems(out / "data", out / "problems")
    answer(start, files["test"], out / "before", SAMPLING)
    before = accuracy_in_sums(read_samples(out / "before" / "samples.jsonl"))
    for seed in missing:
        directory = out / f"seed{seed}"
        note_start(directory)
        options = (f"model.path={start}", f"data.path={files['reinforce']}", f"seed={seed}")
        policy = trained("train", SMOLLM2 / "grpo.yaml", directory / "grpo", (*options, *REINFORCE))
        for name in ("fit", "test", "other"):
            answer(policy, files[name], directory / name, SAMPLING)
        after = accuracy_in_sums(read_samples(directory / "test" / "samples.jsonl"))
        if after < before - MAY_FALL:
            logger.warning(
                "seed %d: accuracy in sums is %.3f, before %.3f: stopped", seed, after, before
            )
            continue
        fit_arms(STUDY, directory, policy)
        say(directory, policy, files["test"])


def say(directory: Path, policy: Path, test: Path) -> None:
    """Have the policy learn its own answers again, each with the mean of the taught adapter's
    numbers, and answer the test once more.
    """
    read = directory / "read_fit.jsonl"
    own_answers = directory / "own_answers.jsonl"
    if not read.is_file():
        dcpo(
            *("calibrate", "--apply", directory / f"adapter{list(ADAPTERS).index(TAUGHT)}"),
            *("--samples", directory / "fit" / "samples.jsonl", "--out", read),
            *("--demonstrations", own_answers, *STUDY.reading),
        )
    options = (f"model.path={policy}", f"data.path={own_answers}", *SAYING)
    said = trained("sft", SMOLLM2 / "sft.yaml", directory / "said", options)
    answer(said, test, directory / STUDY.said, SAMPLING)


def accuracy_in_sums(samples: Sequence[Sample]) -> float:
    """Return the share of right answers to the sums."""
    sums = [float(s.correct) for s in samples if str(s.prompt.kind).startswith("chain_sum")]
    return float(np.mean(sums))
