"""A confidence with parameters of its own against a lookup and the bar, on the quickstart's policy
after GRPO.

The study that is trained here is ``docs/lab/adapter_again.md``, whose design was committed before
its first run. Tables are made of it and of the first one (``docs/lab/adapter.md``), which commits
4ed10e3d to d9098554 trained.
"""

from __future__ import annotations

from pathlib import Path

from lab.confidences import ADAPTERS, SHUFFLED, Study, answer, fit_arms, note_start, trained
from lab.testgrid import REPOSITORY

QUICKSTART = REPOSITORY / "examples" / "quickstart"
TRAIN = QUICKSTART / "data" / "train.jsonl"
HELD_OUT = QUICKSTART / "data" / "heldout.jsonl"
SAMPLING = "--template raw --max-tokens 32 --temperature 1.0 --top-p 1.0 --top-k 0"

FIRST = Study(
    name="adapter",
    verb="adapter",
    title="a confidence with parameters of its own",
    compared=("adapter", "adapter, teacher", "boosted trees"),
    against=("bar",),
)
AGAIN = Study(
    name="adapter_again",
    verb="adapter",
    title="a confidence with parameters of its own, fitted on enough answers",
    compared=(
        *(name for name in ADAPTERS if name != SHUFFLED),
        *(f"{name}, greedy" for name in ADAPTERS if name != SHUFFLED),
        "probe",
        "stack",
        "boosted trees",
    ),
    against=("lookup", "bar", "adapter, T = R"),
    seeds=(1, 2, 3, 4, 5),
    fitting=(
        "optimizer.lr=1e-3",
        "training.epochs=6",
        "data.examples_per_step=128",
        "training.micro_batch_size=256",
        "model.params_dtype=fp32",
        "logging.to=[]",
    ),
    read_greedily=tuple(ADAPTERS),
)


def train(out: Path) -> None:
    """Train the policies, sample them and fit the arms; finished parts are kept."""
    for seed in AGAIN.seeds:
        directory = out / f"seed{seed}"
        note_start(directory)
        options = (f"seed={seed}",)
        policy = trained("train", QUICKSTART / "grpo.yaml", directory / "grpo", options)
        for name, file, repeats in (("fit", TRAIN, 4), ("test", HELD_OUT, 8)):
            sampling = (*SAMPLING.split(), "--repeats", repeats, "--batch-size", 256)
            answer(policy, file, directory / name, sampling)
        fit_arms(AGAIN, directory, policy)
