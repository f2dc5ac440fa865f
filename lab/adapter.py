"""A confidence with parameters of its own against a lookup and the bar, on the quickstart's policy
after GRPO.

The study that is trained here is ``docs/lab/adapter_again.md``, whose design was committed before
its first run. Tables are made of it and of the first one (``docs/lab/adapter.md``), which commits
4ed10e3d to d9098554 trained.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.results import Interval, crossed, read_archive, write_archive, write_json
from lab.testgrid import commit
from megatron_dcpo.calibration import accuracy_at_coverage, auroc, auroc_within
from megatron_dcpo.evaluation import posthoc
from megatron_dcpo.evaluation.samples import Sample, read_samples

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
TRAIN = QUICKSTART / "data" / "train.jsonl"
HELD_OUT = QUICKSTART / "data" / "heldout.jsonl"
SEEDS = (1, 2, 3, 4, 5)
SAMPLING = "--template raw --max-tokens 32 --temperature 1.0 --top-p 1.0 --top-k 0"
ADAPTER = (
    "optimizer.lr=1e-3",
    "training.epochs=6",
    "data.examples_per_step=128",
    "training.micro_batch_size=256",
    "model.params_dtype=fp32",
    "logging.to=[]",
)
# predictors, by what dcpo calibrate reads for them
PREDICTORS = MappingProxyType({"bar": "task", "probe": "states", "stack": "stack"})
SHUFFLED = "adapter, shuffled labels"
# adapters, by their teachers
ADAPTERS = MappingProxyType(
    {
        "adapter, T = R": "correct",
        "adapter, taught by the bar": "task",
        "adapter, taught by the stack": "stack",
        SHUFFLED: "correct",
    }
)


@dataclass(frozen=True)
class Study:
    """Name a study: its page and files begin with ``name``. The arms in ``compared`` are compared
    with those in ``against``.
    """

    name: str
    title: str
    compared: tuple[str, ...]
    against: tuple[str, ...]

    @property
    def records(self) -> str:
        return f"{self.name}_records.tar.xz"


FIRST = Study(
    name="adapter",
    title="a confidence with parameters of its own",
    compared=("adapter", "adapter, teacher", "boosted trees"),
    against=("bar",),
)
AGAIN = Study(
    name="adapter_again",
    title="a confidence with parameters of its own, fitted on enough answers",
    compared=(
        *(name for name in ADAPTERS if name != SHUFFLED),
        *(f"{name}, greedy" for name in ADAPTERS if name != SHUFFLED),
        "probe",
        "stack",
        "boosted trees",
    ),
    against=("lookup", "bar", "adapter, T = R"),
)


def train(out: Path) -> None:
    """Train the policies, sample them and fit the arms; finished parts are kept."""
    for seed in SEEDS:
        directory = out / f"seed{seed}"
        directory.mkdir(parents=True, exist_ok=True)
        _note_start(directory)
        policy = directory / "grpo" / "policy"
        if not policy.is_dir():
            dcpo(
                "train",
                *("--config", QUICKSTART / "grpo.yaml", f"run_dir={directory / 'grpo'}"),
                *(f"seed={seed}", "logging.to=[]", "training.resume=auto"),
                "training.gradient_probe_interval=0",
            )
        for name, file, repeats in (("fit", TRAIN, 4), ("test", HELD_OUT, 8)):
            if not (directory / name / "evaluation.json").is_file():
                dcpo(
                    "evaluate",
                    *("--model", policy, "--out", directory / name),
                    *("--benchmarks", f"{name}={file}", "--repeats", repeats),
                    *(*SAMPLING.split(), "--resamples", 0, "--batch-size", 256),
                    *("--keep", "states"),
                )
        _fit_predictors(directory)
        _fit_adapters(directory, policy)


def _note_start(directory: Path) -> None:
    """Write the commit and the time at which a seed was begun, once."""
    path = directory / "started.json"
    if not path.is_file():
        now = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"commit": commit(), "started": now}))


def _fit_predictors(directory: Path) -> None:
    for name, features in PREDICTORS.items():
        if not (directory / f"{name}.npz").is_file():
            dcpo(
                *("calibrate", "--samples", directory / "fit" / "samples.jsonl"),
                *("--features", features, "--held-out", 0),
                *("--out", directory / f"{name}.npz"),
            )


def _fit_adapters(directory: Path, policy: Path) -> None:
    answers = directory / "fit" / "samples.jsonl"
    for number, (name, teacher) in enumerate(ADAPTERS.items()):
        samples = answers
        if name == SHUFFLED:
            samples = _shuffled(answers, directory / "shuffled")
        run = directory / f"adapter{number}"
        if not (run / "confidence.json").is_file():
            dcpo(
                *("calibrate", "--kind", "adapter", "--model", policy, "--target", "text"),
                *("--teacher", teacher, "--samples", samples, "--held-out", 0),
                *("--out", run, *ADAPTER, "training.resume=auto"),
            )
        for reading in ("mean", "greedy"):
            read = directory / f"{name}, {reading}.jsonl"
            if not read.is_file():
                dcpo(
                    *("calibrate", "--apply", run, "--read", reading, "--out", read),
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
    """Write every tested answer's problem, type, verdict and confidences of the seeds that are
    finished; return how many these are.
    """
    files = {}
    for seed in SEEDS:
        directory = out / f"seed{seed}"
        if not (directory / f"{list(ADAPTERS)[-1]}, greedy.jsonl").is_file():
            break
        tested = _with_states(directory / "test" / "samples.jsonl")
        rows = {
            **json.loads((directory / "started.json").read_text()),
            "problem": [posthoc.problem_of(sample) for sample in tested],
            "kind": [sample.prompt.kind for sample in tested],
            "correct": [float(sample.correct) for sample in tested],
            "arms": {
                arm: np.round(values, 4).tolist()
                for arm, values in _arms(directory, tested).items()
            },
        }
        files[f"seed{seed}.json"] = json.dumps(rows).encode()
    write_archive(archive, files)
    return len(files)


def _with_states(file: Path) -> list[Sample]:
    """Return the samples of a file with the model's states."""
    from megatron_dcpo.evaluation.states import with_states

    return with_states(read_samples(file), file)


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
        "lookup": filled(_lookup(fitted, tested)),
        "boosted trees": filled(_boosted(fitted, tested)),
    }
    for name in PREDICTORS:
        predictor = posthoc.Posthoc.load(directory / f"{name}.npz")
        arms[name] = filled(predictor.predict(tested))
    for name in ADAPTERS:
        for reading, suffix in (("mean", ""), ("greedy", ", greedy")):
            read = read_samples(directory / f"{name}, {reading}.jsonl")
            arms[f"{name}{suffix}"] = filled(
                [sample.measures.posthoc_confidence for sample in read]
            )
    return arms


def _lookup(fitted: Sequence[Sample], tested: Sequence[Sample]) -> list[float | None]:
    """Return the share of right answers among the fitted ones of each tested answer's type."""
    of_kind: dict[str | None, list[bool]] = {}
    for sample in fitted:
        of_kind.setdefault(sample.prompt.kind, []).append(sample.correct)
    shares = {kind: float(np.mean(verdicts)) for kind, verdicts in of_kind.items()}
    return [shares.get(sample.prompt.kind) for sample in tested]


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


def tables(archive: Path, page: Path, study: Study) -> dict[str, Any]:
    """Write ``<name>.json`` and ``<name>_tables.md`` into ``page``; return the former."""
    seeds = {
        name.removesuffix(".json").removeprefix("seed"): with_kinds(json.loads(content))
        for name, content in sorted(read_archive(archive).items())
    }
    result: dict[str, Any] = {
        "seeds": list(seeds),
        "started": [rows.get("started") for rows in seeds.values()],
        "commits": [rows.get("commit") for rows in seeds.values()],
        "arms": {},
        "minus": {},
    }
    for arm in next(iter(seeds.values()))["arms"]:
        result["arms"][arm] = _scores(arm, list(seeds.values()))
    for other in study.against:
        result["minus"][other] = {
            arm: _minus(arm, other, seeds) for arm in study.compared if arm != other
        }
    write_json(page / f"{study.name}.json", result)
    (page / f"{study.name}_tables.md").write_text(_page(study, result))
    return result


def with_kinds(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a seed with the type of each problem, which the first study did not keep:
    its problems are those of the held-out file, by number.
    """
    if "kind" in rows:
        return rows
    kinds = [json.loads(line)["type"] for line in HELD_OUT.read_text().splitlines()]
    numbers = [int(name.rsplit("/", 1)[1]) for name in rows["problem"]]
    return {**rows, "kind": [kinds[number] for number in numbers]}


def _scores(arm: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the scores of an arm, a number for each seed."""
    found: dict[str, list[float]] = {}
    for rows in seeds:
        confidence = np.array(rows["arms"][arm])
        correct = np.array(rows["correct"])
        scores = {
            "brier": float(np.mean((confidence - correct) ** 2)),
            "auroc": float(auroc(confidence, correct)),
            "auroc_within": auroc_within(confidence, correct, rows["kind"]).value,
            "risk_at_half": 1 - float(accuracy_at_coverage(confidence, correct, 0.5)),
        }
        for name, value in scores.items():
            found.setdefault(name, []).append(value)
    return found


def _minus(arm: str, other: str, seeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return Brier(arm) - Brier(other): the mean of each seed, and of all with its 95 % interval
    over seeds and problems.
    """
    by_problem = []
    for rows in seeds.values():
        correct = np.array(rows["correct"])
        of_arm = (np.array(rows["arms"][arm]) - correct) ** 2
        of_other = (np.array(rows["arms"][other]) - correct) ** 2
        _, place = np.unique(rows["problem"], return_inverse=True)
        by_problem.append(np.bincount(place, of_arm - of_other) / np.bincount(place))
    differences = np.array(by_problem)
    pooled = crossed(differences)
    return {
        "seeds": [float(values.mean()) for values in differences],
        "pooled": [pooled.mean, pooled.low, pooled.high],
    }


def _page(study: Study, result: Mapping[str, Any]) -> str:
    lines = [
        f"# Tables: {study.title}",
        "",
        f"By `python -m lab adapter` from `{study.records}`. Mean over seeds "
        f"{', '.join(map(str, result['seeds']))}:",
        "",
        "| | Brier | AUROC | AUROC within types | risk at half coverage |",
        "|---|---|---|---|---|",
    ]
    for arm, values in result["arms"].items():
        means = [np.mean(of_seeds) for of_seeds in values.values()]
        lines.append(f"| {arm} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    for other, rows in result["minus"].items():
        seeds = [f"seed {seed}" for seed in result["seeds"]]
        header = [f"Brier minus that of: {other}", *seeds, "all, over seeds and problems"]
        lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        for arm, row in rows.items():
            shown = [f"{mean:+.4f}" for mean in row["seeds"]]
            gap = Interval(*row["pooled"])
            shown.append(f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]")
            lines.append(f"| {arm} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"
