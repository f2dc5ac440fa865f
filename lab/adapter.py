"""A confidence with parameters of its own against the bar, on the quickstart's policy after GRPO.

The design was committed before the first run (``docs/lab/adapter.md``).
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.results import read_archive, write_archive, write_json
from megatron_dcpo.calibration import accuracy_at_coverage, auroc
from megatron_dcpo.evaluation import posthoc
from megatron_dcpo.evaluation.samples import Sample, read_samples

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
RECORDS = "adapter_records.tar.xz"
SEEDS = (1, 2, 3)
SAMPLING = "--template raw --max-tokens 32 --temperature 1.0 --top-p 1.0 --top-k 0"
ADAPTER = (
    "optimizer.lr=1e-3",
    "training.epochs=6",
    "data.examples_per_step=128",
    "training.micro_batch_size=256",
    "model.params_dtype=fp32",
    "logging.to=[]",
)
# the arms and what dcpo calibrate is asked for; "shuffled" learns labels that say nothing
ADAPTERS = {
    "adapter": (),
    "adapter, teacher": ("--teacher", "logistic"),
    "adapter, shuffled labels": (),
}
RESAMPLES = 2000


def train(out: Path) -> None:
    """Train the policies, sample them and fit the arms; finished parts are kept."""
    fit = out / "fit.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    write_unseen(fit)
    for seed in SEEDS:
        directory = out / f"seed{seed}"
        policy = directory / "grpo" / "policy"
        if not policy.is_dir():
            dcpo(
                "train",
                *("--config", QUICKSTART / "grpo.yaml", f"run_dir={directory / 'grpo'}"),
                *(f"seed={seed}", "logging.to=[]", "training.resume=auto"),
                "training.gradient_probe_interval=0",
            )
        for name, file, repeats in (
            ("fit", fit, 4),
            ("test", QUICKSTART / "data" / "heldout.jsonl", 8),
        ):
            if not (directory / name / "evaluation.json").is_file():
                dcpo(
                    "evaluate",
                    *("--model", policy, "--out", directory / name),
                    *("--benchmarks", f"{name}={file}", "--repeats", repeats),
                    *(*SAMPLING.split(), "--resamples", 0, "--batch-size", 256),
                )
        _fit_arms(directory, policy)


def _fit_arms(directory: Path, policy: Path) -> None:
    answers = directory / "fit" / "samples.jsonl"
    if not (directory / "bar.npz").is_file():
        dcpo(
            *("calibrate", "--samples", answers, "--features", "task"),
            *("--held-out", 0, "--out", directory / "bar.npz"),
        )
    for number, (name, options) in enumerate(ADAPTERS.items()):
        read = directory / f"{name}.jsonl"
        if read.is_file():
            continue
        samples = answers
        if "shuffled" in name:
            samples = _shuffled(answers, directory / "shuffled")
        run = directory / f"adapter{number}"
        dcpo(
            *("calibrate", "--kind", "adapter", "--model", policy, *options),
            *("--samples", samples, "--held-out", 0, "--out", run, *ADAPTER),
            "training.resume=auto",
        )
        dcpo(
            *("calibrate", "--apply", run, "--out", read),
            *("--samples", directory / "test" / "samples.jsonl"),
            "model.params_dtype=fp32",
        )


def _shuffled(answers: Path, out: Path) -> Path:
    """Write the answers with their verdicts dealt to them anew, beside their settings."""
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    verdicts = [row["correct"] for row in rows]
    random.Random(0).shuffle(verdicts)
    out.mkdir(exist_ok=True)
    path = out / "samples.jsonl"
    lines = (
        json.dumps({**row, "correct": verdict}) + "\n"
        for row, verdict in zip(rows, verdicts, strict=True)
    )
    path.write_text("".join(lines))
    settings = answers.with_name("settings.json")
    (out / "settings.json").write_text(settings.read_text())
    return path


def write_unseen(out: Path) -> None:
    """Write the lab's validation problems that are in no file of the quickstart."""
    seen = set()
    for file in ("train.jsonl", "heldout.jsonl"):
        for line in (QUICKSTART / "data" / file).read_text().splitlines():
            seen.add(json.loads(line)["problem"])
    validation = ROOT / "examples" / "lab" / "data" / "heldout.jsonl"
    lines = [
        line
        for line in validation.read_text().splitlines()
        if json.loads(line)["problem"] not in seen
    ]
    out.write_text("".join(f"{line}\n" for line in lines))


def dcpo(*arguments: object) -> None:
    """Run a verb as a user does. Raises CalledProcessError if it fails."""
    words = [str(word) for word in arguments]
    logger.info("dcpo %s", " ".join(words))
    subprocess.run(
        [sys.executable, "-m", "megatron_dcpo", *words],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# ----------------------------------------------------------------------------------------- results
def pack(out: Path, archive: Path) -> int:
    """Write every tested answer's problem, verdict and confidences of the seeds that are finished;
    return how many these are.
    """
    files = {}
    for seed in SEEDS:
        directory = out / f"seed{seed}"
        if not (directory / f"{list(ADAPTERS)[-1]}.jsonl").is_file():
            continue
        tested = read_samples(directory / "test" / "samples.jsonl")
        rows = {
            "problem": [posthoc.problem_of(sample) for sample in tested],
            "correct": [float(sample.correct) for sample in tested],
            "arms": {
                arm: np.round(values, 4).tolist()
                for arm, values in _arms(directory, tested).items()
            },
        }
        files[f"seed{seed}.json"] = json.dumps(rows).encode()
    write_archive(archive, files)
    return len(files)


def tables(archive: Path, page: Path) -> dict[str, Any]:
    """Write ``adapter.json`` and ``adapter_tables.md`` into ``page``; return the former."""
    seeds = {
        name.removesuffix(".json").removeprefix("seed"): json.loads(content)
        for name, content in sorted(read_archive(archive).items())
    }
    result: dict[str, Any] = {"seeds": list(seeds), "arms": {}, "minus_bar": {}}
    for arm in next(iter(seeds.values()))["arms"]:
        by_seed = [
            (np.array(rows["arms"][arm]), np.array(rows["correct"])) for rows in seeds.values()
        ]
        result["arms"][arm] = {
            "brier": [float(np.mean((c - y) ** 2)) for c, y in by_seed],
            "auroc": [float(auroc(c, y)) for c, y in by_seed],
            "risk_at_half": [1 - float(accuracy_at_coverage(c, y, 0.5)) for c, y in by_seed],
        }
    for arm in ("adapter", "adapter, teacher", "boosted trees"):
        result["minus_bar"][arm] = _minus_bar(arm, seeds)
    write_json(page / "adapter.json", result)
    (page / "adapter_tables.md").write_text(_page(result))
    return result


def _arms(directory: Path, tested: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the confidence of every arm in every tested answer; one that an arm has none of gets
    the share of right answers among those fitted.
    """
    fitted = read_samples(directory / "fit" / "samples.jsonl")
    constant = float(np.mean([sample.correct for sample in fitted]))

    def filled(values: Sequence[float | None]) -> np.ndarray:
        return np.array([constant if value is None else value for value in values])

    arms = {
        "stated": filled([sample.judgement.confidence for sample in tested]),
        "constant": np.full(len(tested), constant),
        "bar": filled(posthoc.Posthoc.load(directory / "bar.npz").predict(tested)),
        "boosted trees": filled(_boosted(fitted, tested)),
    }
    for name in ADAPTERS:
        read = read_samples(directory / f"{name}.jsonl")
        arms[name] = filled([sample.measures.posthoc_confidence for sample in read])
    return arms


def _boosted(fitted: Sequence[Sample], tested: Sequence[Sample]) -> list[float | None]:
    """Return what boosted trees on the inputs of the bar say of the tested answers."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    kinds = sorted({str(sample.prompt.kind) for sample in fitted})

    def inputs(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        values, known = posthoc.inputs_of(samples, "task")
        chosen = [str(samples[index].prompt.kind) for index in known]
        return posthoc.with_tasks(values, chosen, np.array(kinds)), known

    x, known = inputs(fitted)
    y = np.array([fitted[index].correct for index in known], float)
    model = HistGradientBoostingClassifier(random_state=0).fit(x, y)
    x, known = inputs(tested)
    predictions: list[float | None] = [None] * len(tested)
    for index, value in zip(known, model.predict_proba(x)[:, 1], strict=True):
        predictions[index] = float(value)
    return predictions


def _minus_bar(arm: str, seeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return Brier(arm) - Brier(bar): for each seed the mean over problems with its 95 % interval
    by the bootstrap over problems, and the same pooled over seeds and problems.
    """
    chosen = np.random.default_rng(0)
    rows_of = {}
    for seed, rows in seeds.items():
        y = np.array(rows["correct"])
        of_arm = (np.array(rows["arms"][arm]) - y) ** 2
        of_bar = (np.array(rows["arms"]["bar"]) - y) ** 2
        _, place = np.unique(rows["problem"], return_inverse=True)
        by_problem = np.bincount(place, of_arm - of_bar) / np.bincount(place)
        rows_of[f"seed {seed}"] = by_problem
    rows_of["pooled"] = np.mean(list(rows_of.values()), axis=0)
    found = {}
    for name, values in rows_of.items():
        draws = chosen.integers(len(values), size=(RESAMPLES, len(values)))
        low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
        found[name] = [float(values.mean()), float(low), float(high)]
    return found


def _page(result: Mapping[str, Any]) -> str:
    lines = [
        "# Tables: a confidence with parameters of its own",
        "",
        f"Mean over seeds {', '.join(map(str, result['seeds']))}:",
        "",
        "| | Brier | AUROC | risk at half coverage |",
        "|---|---|---|---|",
    ]
    for arm, values in result["arms"].items():
        means = [np.mean(values[key]) for key in ("brier", "auroc", "risk_at_half")]
        lines.append(f"| {arm} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    lines += ["", "With 95 % intervals:", ""]
    header = ["Brier minus the bar's", *next(iter(result["minus_bar"].values()))]
    lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for arm, rows in result["minus_bar"].items():
        shown = [f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" for mean, low, high in rows.values()]
        lines.append(f"| {arm} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"
