"""Confidences that are fitted on judged answers of one frozen policy and tested on others: their
arms, records and tables.

The directory of a policy holds ``fit/`` and ``test/``, evaluations with log-probs and states, and
may hold tests of other problems. :func:`fit_arms` fits on the first and leaves what every arm says
of the others; :func:`pack` makes the published records of it, and :func:`tables` the tables.
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
from lab.testgrid import REPOSITORY, commit
from megatron_dcpo.calibration import accuracy_at_coverage, auroc, auroc_within
from megatron_dcpo.evaluation import posthoc
from megatron_dcpo.evaluation.samples import Sample, read_samples

logger = logging.getLogger(__name__)

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
# of a model that has learned to state what an adapter says: rows of the tables
SAID_MINUS_LOOKUP = "Brier, stated minus lookup"
ACCURACY_GAINED = "accuracy, minus that of the policy before"
# of the first study
_HELD_OUT = REPOSITORY / "examples" / "quickstart" / "data" / "heldout.jsonl"


@dataclass(frozen=True)
class Study:
    """Name a study: its page and files begin with ``name``, and ``python -m lab VERB`` makes its
    tables. The arms in ``compared`` are compared
    with those in ``against``. ``fitting`` are options of ``dcpo calibrate --kind adapter``, and
    ``reading`` of ``--apply``; of the adapters in ``read_greedily`` the most probable number is
    read as well as the mean. ``tests`` are tested, the first of them by every arm. ``said`` has the
    answers to the first test of a model that has learned to state what one of the adapters says.
    """

    name: str
    verb: str
    title: str
    compared: tuple[str, ...]
    against: tuple[str, ...]
    seeds: tuple[int, ...] = ()
    fitting: tuple[str, ...] = ()
    reading: tuple[str, ...] = ("model.params_dtype=fp32",)
    read_greedily: tuple[str, ...] = ()
    tests: tuple[str, ...] = ("test",)
    said: str = ""

    @property
    def records(self) -> str:
        return f"{self.name}_records.tar.xz"


def note_start(directory: Path) -> None:
    """Make the directory of a policy, with the commit and the time at which it was begun."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "started.json"
    if not path.is_file():
        now = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"commit": commit(), "started": now}))


def trained(verb: str, config: Path, run_dir: Path, options: Sequence[object]) -> Path:
    """Train by a verb of dcpo, unless that is done; return the directory of the policy."""
    policy = run_dir / "policy"
    if not policy.is_dir():
        own = (f"run_dir={run_dir}", "training.resume=auto", "logging.to=[]")
        dcpo(verb, "--config", config, *options, *own)
    return policy


def answer(policy: Path, problems: Path, out: Path, options: Sequence[object]) -> None:
    """Have a policy answer problems, unless that is done; log-probs and states are kept."""
    if not (out / "evaluation.json").is_file():
        dcpo(
            *("evaluate", "--model", policy, "--benchmarks", f"{out.name}={problems}"),
            *("--out", out, "--keep", "states", "--resamples", 0, *options),
        )


def fit_arms(study: Study, directory: Path, policy: Path) -> None:
    """Fit the arms of a study on the answers of a policy, and read them; finished parts are
    kept.
    """
    answers = directory / "fit" / "samples.jsonl"
    for name, features in PREDICTORS.items():
        if not (directory / f"{name}.npz").is_file():
            dcpo(
                *("calibrate", "--samples", answers, "--features", features),
                *("--held-out", 0, "--out", directory / f"{name}.npz"),
            )
    for number, (name, teacher) in enumerate(ADAPTERS.items()):
        samples = _shuffled(answers, directory / "shuffled") if name == SHUFFLED else answers
        run = directory / f"adapter{number}"
        if not (run / "confidence.json").is_file():
            dcpo(
                *("calibrate", "--kind", "adapter", "--model", policy, "--target", "text"),
                *("--teacher", teacher, "--samples", samples, "--held-out", 0),
                *("--out", run, *study.fitting, "training.resume=auto"),
            )
        for test in study.tests:
            for reading in _readings(study, name):
                read = directory / _read_as(name, reading, test)
                if not read.is_file():
                    dcpo(
                        *("calibrate", "--apply", run, "--read", reading, "--out", read),
                        *("--samples", directory / test / "samples.jsonl", *study.reading),
                    )


def _readings(study: Study, name: str) -> tuple[str, ...]:
    return ("mean", "greedy") if name in study.read_greedily else ("mean",)


def _read_as(name: str, reading: str, test: str) -> str:
    """Return the name of the file that has what an adapter says of a test."""
    return f"{name}, {reading}.jsonl" if test == "test" else f"{name}, {reading}, {test}.jsonl"


def _shuffled(answers: Path, out: Path) -> Path:
    """Write the answers with their verdicts in another order, next to their settings."""
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
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# ----------------------------------------------------------------------------------------- results
def pack(study: Study, out: Path, archive: Path) -> int:
    """Write every tested answer's problem, kind, verdict and confidences of the seeds below ``out``
    that are finished; return how many these are. Other seeds, which another machine has packed,
    stay in the archive.
    """
    files = read_archive(archive) if archive.is_file() else {}
    finished = 0
    for seed in study.seeds:
        directory = out / f"seed{seed}"
        last = list(ADAPTERS)[-1]
        if not (directory / _read_as(last, _readings(study, last)[-1], study.tests[-1])).is_file():
            continue
        for test in study.tests:
            name = f"seed{seed}.json" if test == "test" else f"{test}.seed{seed}.json"
            files[name] = json.dumps(_records(study, directory, test)).encode()
        if study.said and (directory / study.said / "evaluation.json").is_file():
            said = _records_of_said(directory, study.said)
            files[f"{study.said}.seed{seed}.json"] = json.dumps(said).encode()
        finished += 1
    write_archive(archive, files)
    return finished


def packed_seeds(study: Study, archive: Path) -> list[int]:
    """Return the seeds that are packed, with all that the study tests of them."""
    names = set(read_archive(archive)) if archive.is_file() else set()
    last = study.said or study.tests[-1]
    return [seed for seed in study.seeds if f"{last}.seed{seed}.json" in names]


def _records(study: Study, directory: Path, test: str) -> dict[str, Any]:
    tested = _with_states(directory / test / "samples.jsonl")
    return _with_arms(directory, tested, _arms(study, directory, test, tested))


def _with_arms(
    directory: Path, tested: Sequence[Sample], arms: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    return {
        **json.loads((directory / "started.json").read_text()),
        "problem": [posthoc.problem_of(sample) for sample in tested],
        "kind": [sample.prompt.kind for sample in tested],
        "correct": [float(sample.correct) for sample in tested],
        "arms": {arm: np.round(values, 4).tolist() for arm, values in arms.items()},
    }


def _records_of_said(directory: Path, said: str) -> dict[str, Any]:
    """Return the records of the model that has learned to state a confidence: its answers, with
    what it states and with the lookup that was fitted on the answers of the policy before.
    """
    tested = read_samples(directory / said / "samples.jsonl")
    fitted = read_samples(directory / "fit" / "samples.jsonl")
    return _with_arms(directory, tested, _arms_of_no_adapter(fitted, tested))


def _with_states(file: Path) -> list[Sample]:
    """Return the samples of a file with the model's states."""
    from megatron_dcpo.evaluation.states import with_states

    return with_states(read_samples(file), file)


def _arms(
    study: Study, directory: Path, test: str, tested: Sequence[Sample]
) -> dict[str, np.ndarray]:
    """Return the confidence of every arm in every tested answer; one that an arm has none of gets
    the share of right answers among those fitted.
    """
    fitted = read_samples(directory / "fit" / "samples.jsonl")
    constant = _accuracy(fitted)
    arms = {
        **_arms_of_no_adapter(fitted, tested),
        "boosted trees": _filled(_boosted(fitted, tested), constant),
    }
    for name in PREDICTORS:
        predictor = posthoc.Posthoc.load(directory / f"{name}.npz")
        arms[name] = _filled(predictor.predict(tested), constant)
    for name in ADAPTERS:
        for reading in _readings(study, name):
            read = read_samples(directory / _read_as(name, reading, test))
            found = [sample.measures.posthoc_confidence for sample in read]
            arms[name if reading == "mean" else f"{name}, {reading}"] = _filled(found, constant)
    return arms


def _arms_of_no_adapter(
    fitted: Sequence[Sample], tested: Sequence[Sample]
) -> dict[str, np.ndarray]:
    """Return what is stated, the share of right answers among the fitted ones, and the lookup."""
    constant = _accuracy(fitted)
    return {
        "stated": _filled([sample.judgement.confidence for sample in tested], constant),
        "constant": np.full(len(tested), constant),
        "lookup": _filled(_lookup(fitted, tested), constant),
    }


def _accuracy(samples: Sequence[Sample]) -> float:
    return float(np.mean([sample.correct for sample in samples]))


def _filled(values: Sequence[float | None], constant: float) -> np.ndarray:
    return np.array([constant if value is None else value for value in values])


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
    files = {
        name.removesuffix(".json"): with_kinds(json.loads(content))
        for name, content in sorted(read_archive(archive).items())
    }
    seeds = _of_test(files, "seed")
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
    for test in (*study.tests[1:], study.said):
        of_test = list(_of_test(files, f"{test}.seed").values())
        if of_test:
            scores = {arm: _scores(arm, of_test) for arm in of_test[0]["arms"]}
            result.setdefault("others", {})[test] = scores
    said = _of_test(files, f"{study.said}.seed")
    if said:
        result["said"] = {
            SAID_MINUS_LOOKUP: _minus("stated", "lookup", said),
            ACCURACY_GAINED: _accuracy_gained(said, seeds),
        }
    if study.said:
        result["accuracy"] = {
            name: float(np.mean(rows["correct"])) for name, rows in sorted(files.items())
        }
    write_json(page / f"{study.name}.json", result)
    (page / f"{study.name}_tables.md").write_text(_page(study, result))
    return result


def _of_test(files: Mapping[str, dict[str, Any]], begin: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a test by seed: of the files whose names are ``begin`` and the seed."""
    return {
        name.removeprefix(begin): rows for name, rows in files.items() if name.startswith(begin)
    }


def with_kinds(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a seed with the type of each problem, which the first study did not keep:
    its problems are those of the held-out file, by number.
    """
    if "kind" in rows:
        return rows
    kinds = [json.loads(line)["type"] for line in _HELD_OUT.read_text().splitlines()]
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
    return _pooled(np.array(by_problem))


def _accuracy_gained(
    said: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the accuracy of the models that learned to state a confidence minus that of the
    policies before, with its 95 % interval over seeds and problems. Both answered each problem of
    the test once.
    """
    by_problem = []
    for seed, rows in said.items():
        after_of = _verdicts(rows)
        before_of = _verdicts(before[seed])
        by_problem.append([after_of[number] - before_of[number] for number in sorted(before_of)])
    return _pooled(np.array(by_problem))


def _verdicts(rows: Mapping[str, Any]) -> dict[int, float]:
    """Return the verdicts by the number of the problem in its file, which ends its name; the name
    of the test is in front of it.
    """
    numbers = [int(name.rsplit("/", 1)[1]) for name in rows["problem"]]
    return dict(zip(numbers, rows["correct"], strict=True))


def _pooled(differences: np.ndarray) -> dict[str, Any]:
    """Return the mean of each seed, and of all with its 95 % interval, of [seeds, problems]."""
    pooled = crossed(differences)
    return {
        "seeds": [float(values.mean()) for values in differences],
        "pooled": [pooled.mean, pooled.low, pooled.high],
    }


def _page(study: Study, result: Mapping[str, Any]) -> str:
    lines = [
        f"# Tables: {study.title}",
        "",
        f"By `python -m lab {study.verb}` from `{study.records}`. Mean over seeds "
        f"{', '.join(map(str, result['seeds']))}:",
        "",
        *_table_of_scores(result["arms"]),
    ]
    for test, arms in result.get("others", {}).items():
        lines += ["", f"On the answers of the test `{test}`:", "", *_table_of_scores(arms)]
    if "accuracy" in result:
        lines += ["", "| answers | accuracy |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in result["accuracy"].items()]
    if "said" in result:
        lines += _table_of_differences("what is said", result["said"], result["seeds"])
    for other, rows in result["minus"].items():
        title = f"Brier minus that of: {other}"
        lines += _table_of_differences(title, rows, result["seeds"])
    return "\n".join(lines) + "\n"


def _table_of_differences(
    title: str, rows: Mapping[str, Mapping[str, Any]], seeds: Sequence[str]
) -> list[str]:
    """Return the lines of a table of differences, of each seed and of all."""
    header = [title, *(f"seed {seed}" for seed in seeds), "all, over seeds and problems"]
    lines = ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, row in rows.items():
        shown = [f"{mean:+.4f}" for mean in row["seeds"]]
        gap = Interval(*row["pooled"])
        shown.append(f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def _table_of_scores(arms: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return the lines of a table of every arm's scores, means of the seeds."""
    lines = [
        "| | Brier | AUROC | AUROC within types | risk at half coverage |",
        "|---|---|---|---|---|",
    ]
    for arm, values in arms.items():
        means = [np.mean(of_seeds) for of_seeds in values.values()]
        lines.append(f"| {arm} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    return lines
