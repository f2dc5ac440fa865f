"""``real_model_tables.md``: a real language model before RL and after each method, from
``real_model_records.tar.xz`` alone.

``python examples/smollm2/study.py --runs runs/smollm2`` publishes evaluated runs first; without
``--runs`` it makes the tables of the published records. These are the judged samples of ``dcpo
evaluate`` (``runs/smollm2/METHOD/PART/samples.jsonl``) and the metrics of the trainings. Whatever
is fitted, the lookup too, is fitted on the validation problems of the same policy, never on the
test's; the lookup of the validation problems themselves is fitted on the other half of them.

The published records are of four tasks of which two can be guessed, and their study is withdrawn
(``docs/lab/real_model.md``): tables that show it come first.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lab.fitted import Records, fitted_by_halves, isotonic, lookup  # noqa: E402
from lab.results import read_archive, write_archive  # noqa: E402
from lab.testtables import bands, by_problem, table  # noqa: E402
from megatron_dcpo.calibration import auroc, binned_error, brier, ece, pce  # noqa: E402
from megatron_dcpo.calibration.diagrams import comparison_grid  # noqa: E402
from megatron_dcpo.calibration.metrics import as_confidences, bin_rows, bootstrap_ci  # noqa: E402
from megatron_dcpo.errors import UserError  # noqa: E402
from megatron_dcpo.evaluation.posthoc_predictors import fit  # noqa: E402
from megatron_dcpo.evaluation.samples import Sample, read_samples  # noqa: E402

RECORDS = "real_model_records.tar.xz"
BAR = "logistic regression: log-prob, length, task"
LOOKUP = "lookup, one number per task and size"
GROUP_SIZE = 8  # responses to a prompt in training
METHODS = MappingProxyType(
    {
        "base": "before RL",
        "grpo": "GRPO",
        "dcpo": "DCPO",
        "dcpo_proper": "DCPO-proper",
        "rlcr": "RLCR",
    }
)
PARTS = MappingProxyType(
    {
        "test": "Test",
        "ood": "Out of distribution",
        "validation": "Validation, on which all choices are made",
    }
)
STEPS = (
    "reward/accuracy",
    "confidence/mean",
    "calibration/ece",
    "calibration/auroc",
    "entropy",
    "length/mean",
)

WITHDRAWN = (
    "**Withdrawn** ([why](real_model.md)): two of the four tasks can be guessed, GRPO's gain is on",
    "these two, and the three trainings had different numbers of groups to learn from. The numbers",
    "are right for these responses; they do not say what a calibrated confidence costs.",
    "",
)

Samples = Mapping[str, Sequence[Sample]]  # part -> judged samples of one policy
Controls = Mapping[
    str, Mapping[str, Mapping[str, list[float]]]
]  # method -> part -> name -> a number per sample
Values = Callable[[np.ndarray, np.ndarray], float]


def pack(runs: Path, out: Path) -> int:
    """Write the records of the evaluations below ``runs`` to ``out``; return the number of
    files.
    """
    kept: dict[str, bytes] = {}
    for method in METHODS:
        for part in PARTS:
            for name, file in {
                f"{part}.jsonl": "samples.jsonl",
                f"{part}.controls.json": "controls.json",
            }.items():
                if (path := runs / method / part / file).is_file():
                    kept[f"{method}/{name}"] = path.read_bytes()
        if (metrics := runs / method / "metrics.jsonl").is_file():
            kept[f"{method}/metrics.jsonl"] = metrics.read_bytes()
    if not kept:
        raise UserError(
            f"{runs}: no METHOD/PART/samples.jsonl there; docs/lab/real_model.md says how they "
            "are made"
        )
    write_archive(out, kept)
    return len(kept)


def unpack(archive: Path) -> dict[str, bytes]:
    """Return what :func:`pack` wrote: content by name."""
    if not archive.is_file():
        raise UserError(
            f"{archive}: no records; make them with: python examples/smollm2/study.py --runs "
            "runs/smollm2"
        )
    return read_archive(archive)


def load(files: Mapping[str, bytes], scratch: Path) -> dict[str, dict[str, list[Sample]]]:
    """Return the samples by method and part. ``scratch``: a directory to write a file to."""
    found: dict[str, dict[str, list[Sample]]] = {}
    for name, content in files.items():
        method, _, file = name.partition("/")
        if file.count(".") == 1 and file != "metrics.jsonl":
            (scratch / "samples.jsonl").write_bytes(content)
            found.setdefault(method, {})[file.removesuffix(".jsonl")] = list(
                read_samples(scratch / "samples.jsonl")
            )
    return found


def controls_in(files: Mapping[str, bytes]) -> Controls:
    """Return what ``controls.py`` wrote, by method and part."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, content in files.items():
        if name.endswith(".controls.json"):
            method, _, file = name.partition("/")
            found.setdefault(method, {})[file.removesuffix(".controls.json")] = json.loads(content)
    return found


def draw(runs: Mapping[str, Samples], path: Path) -> None:
    """Write the picture: stated confidence against accuracy on the test problems, of every
    policy.
    """
    bins, notes = {}, {}
    for name, title in METHODS.items():
        if "test" in runs.get(name, {}):
            samples = runs[name]["test"]
            stated, right = (
                as_confidences([s.judgement.confidence for s in samples]),
                [s.correct for s in samples],
            )
            bins[title] = bin_rows(stated, right)
            notes[title] = f"accuracy {np.mean(right):.2f}\nECE {ece(stated, right):.3f}"
    if bins:
        comparison_grid(bins, notes, columns=len(bins)).savefig(path, dpi=150, facecolor="white")


def confidences(
    of: Samples, part: str, controls: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, np.ndarray]:
    """Return every confidence of one policy on ``part``: stated, made from it or from log-probs,
    and controls (of ``controls.py``, by part, where they were made).
    """
    samples, validation = (of[part], of.get("validation") if part != "validation" else None)
    found = {"stated": as_confidences([s.judgement.confidence for s in samples])}
    if validation:
        for name, (method, source) in {
            "stated, isotonic": ("isotonic", "verbal"),
            "log-prob of the reasoning, isotonic": ("isotonic", "logprob"),
            "logistic: stated, log-probs, length": ("logistic", None),
        }.items():
            predictor, _ = fit(method, validation, source, held_out=0)
            found[name] = as_confidences(predictor.predict(samples))
        predictor, _ = fit("logistic", by_task(validation), "task", held_out=0)
        found[BAR] = as_confidences(predictor.predict(by_task(samples)))
    found |= {name: np.array(values) for name, values in controls.get(part, {}).items()}
    if validation and "P(true)" in found:
        known = np.array(controls["validation"]["P(true)"])
        found["P(true), isotonic"] = isotonic(
            known, np.array([float(s.correct) for s in validation])
        )(found["P(true)"])
    if any(s.response.sample_index for s in samples):
        found["agreement with the other responses"] = agreement(samples)
    if fitted := of.get("validation"):
        found[LOOKUP] = looked_up(samples, fitted)
    return found


def looked_up(samples: Sequence[Sample], fitted: Sequence[Sample]) -> np.ndarray:
    """Return the accuracy of each sample's kind on the ``fitted`` problems, of all of them for a
    kind they do not have. Samples that are the fitted ones themselves get that of the other half of
    their problems: leaving out the problem alone would lower the number of just those that are
    right, and turn the order within a kind round.
    """
    unknown = np.full(len(samples), np.nan)
    if samples is fitted:
        return fitted_by_halves(records(samples, unknown), lookup).confidence
    stated = lookup(records(fitted, np.full(len(fitted), np.nan)))
    return stated(records(samples, unknown))


def agreement(samples: Sequence[Sample]) -> np.ndarray:
    """Return, for each response, the share of the problem's other responses with the same answer;
    NaN without one.
    """
    by_problem: dict[str, list[str | None]] = {}
    for s in samples:
        by_problem.setdefault(s.prompt.prompt_id, []).append(s.judgement.answer)
    return np.array(
        [
            (by_problem[s.prompt.prompt_id].count(s.judgement.answer) - 1)
            / max(len(by_problem[s.prompt.prompt_id]) - 1, 1)
            if s.judgement.answer is not None
            else math.nan
            for s in samples
        ]
    )


def records(samples: Sequence[Sample], confidence: np.ndarray) -> Records:
    """Return the responses as the lab's records."""
    _, problem = np.unique([s.prompt.prompt_id for s in samples], return_inverse=True)
    kind = np.array([str(s.prompt.kind) for s in samples])
    correct = np.array([float(s.correct) for s in samples])
    nothing = np.zeros(len(samples))
    return Records(problem, kind, correct, confidence, nothing, nothing)


def auroc_within(r: Records) -> float:
    """Return the mean AUROC within the kinds of problem: what a confidence knows beyond task and
    size.
    """
    return float(
        np.nanmean(
            [auroc(r.confidence[r.kind == k], r.correct[r.kind == k]) for k in np.unique(r.kind)]
        )
    )


def resampled(r: Records, value: Values) -> tuple[float, float, float]:
    """Return ``value`` and the ends of its 95 % interval over problems (bootstrap). Not for ECE:
    ``binned_error``.
    """
    return value(r.confidence, r.correct), *bootstrap_ci(value, r.confidence, r.correct, r.problem)


def skill(r: Records, reference: np.ndarray) -> tuple[float, float, float]:
    """Return 1 - Brier / Brier of the ``reference`` confidence on the same responses, and the ends
    of its 95 % interval over problems (bootstrap).
    """
    known = ~np.isnan(r.confidence) & ~np.isnan(reference)
    own = np.where(known, (np.nan_to_num(r.confidence) - r.correct) ** 2, 0.0)
    other = np.where(known, (np.nan_to_num(reference) - r.correct) ** 2, 0.0)
    errors, baseline = (np.bincount(r.problem, weights=values) for values in (own, other))
    drawn = np.random.default_rng(0).integers(0, len(errors), (2000, len(errors)))
    values = 1 - errors[drawn].sum(axis=1) / baseline[drawn].sum(axis=1)
    low, high = np.quantile(values, (0.025, 0.975))
    return 1 - float(errors.sum() / baseline.sum()), float(low), float(high)


def shown(found: tuple[float, float, float]) -> str:
    """Return ``value [low, high]``, the value alone where its interval is not known."""
    if math.isnan(found[1]):
        return f"{found[0]:.3f}"
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def tables(archive: Path, out: Path, scratch: Path) -> str:
    """Write ``real_model_tables.md`` and ``real_model.png`` to ``out``; return the text."""
    files = unpack(archive)
    runs, controls = load(files, scratch), controls_in(files)
    lines = [
        "# Tables of the real model",
        "",
        f"Made by `python examples/smollm2/study.py` from `{RECORDS}` alone.",
        "",
        *(WITHDRAWN if can_be_guessed(runs) else ()),
        *_groups(files),
    ]
    for part, title in PARTS.items():
        of_part = {name: of for name, of in runs.items() if part in of}
        if not of_part:
            continue
        rows = _confidences(of_part, part, controls)
        lines += [
            f"## {title}",
            "",
            *_policies(of_part, part),
            *_answers(of_part, part),
            *_by_task(of_part, part),
            *rows,
            *_ranks_by_task(of_part, part),
        ]
    lines += ["## Steps", "", *_steps(files)]
    draw(runs, out / "real_model.png")
    (out / "real_model_tables.md").write_text("\n".join(lines))
    return "\n".join(lines)


def _policies(runs: Mapping[str, Samples], part: str) -> list[str]:
    rows = []
    for name, title in METHODS.items():
        if name in runs:
            samples = runs[name][part]
            r = records(samples, as_confidences([s.judgement.confidence for s in samples]))
            problems, repeats = (
                r.problem.max() + 1,
                max(s.response.sample_index for s in samples) + 1,
            )
            length = np.mean([s.judgement.length for s in samples])
            malformed = np.mean([s.judgement.status != "ok" for s in samples])
            accuracy = shown(resampled(r, lambda c, y: float(y.mean())))
            solved = (
                f"{np.mean(np.bincount(r.problem, weights=r.correct) > 0):.3f}"
                if repeats > 1
                else "–"
            )
            mean, spread = np.nanmean(r.confidence), np.nanstd(r.confidence)
            cells = (f"{mean:.3f}", f"{spread:.3f}", f"{length:.1f}", f"{malformed:.4f}")
            rows.append((title, f"{problems} x {repeats}", accuracy, solved, *cells))
    text = (
        "Policies, with 95 % intervals over problems (bootstrap); one training each. "
        "pass@k: of all k responses."
    )
    columns = ("responses", "accuracy", "pass@k", "mean c", "sd of c", "tokens", "violations")
    return table(text, columns, rows)


def _confidences(runs: Mapping[str, Samples], part: str, controls: Controls) -> list[str]:
    rows = []
    for name, title in METHODS.items():
        if name not in runs:
            continue
        found = confidences(runs[name], part, controls.get(name, {}))
        right = np.array([float(s.correct) for s in runs[name][part]])
        reference = found.get(LOOKUP, np.full(len(right), right.mean()))
        for kind, confidence in found.items():
            r = records(runs[name][part], confidence)
            band = bands([r])[1]
            corrected = shown(binned_error(r.confidence, r.correct, r.problem))
            scores = (f"{ece(r.confidence, r.correct):.3f}", corrected, f"{band:.3f}")
            scores += (f"{pce(r.confidence, r.correct):.3f}",)
            ranks = (shown(resampled(r, auroc)), f"{auroc_within(r):.3f}")
            rows.append(
                (
                    f"{title}: {kind}",
                    *scores,
                    shown(resampled(r, brier)),
                    shown(skill(r, reference)),
                    *ranks,
                )
            )
    text = (
        "Confidences. ECE: plug-in, and corrected for its bias. Band: what 95 % of calibrated "
        "models with responses as "
        "alike within a problem stay below in the plug-in. Skill: 1 - Brier / Brier of the "
        "lookup. Fitted rows: on the "
        "policy's own validation responses."
    )
    if part == "validation" and can_be_guessed(runs):
        # controls.py of that study applied the probes to what they were fitted on
        text += (
            " Probes: here in sample, fitted on these same responses, so that these rows are too "
            "good; the test's are not."
        )
    return table(
        text,
        ("ECE", "corrected", "band", "PCE", "Brier", "skill", "AUROC", "AUROC within kinds"),
        rows,
    )


def task_of(sample: Sample) -> str:
    """Return the task: the first word of the kind, which has the size behind it."""
    return str(sample.prompt.kind).split()[0]


def can_be_guessed(runs: Mapping[str, Samples]) -> bool:
    """Return whether a task of the withdrawn study is among those of the runs."""
    found = {task for of in runs.values() for part in of for task in tasks_of({"": of}, part)}
    return bool(found & {"gcd", "letter_counting"})


def by_task(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with their task as kind, without the size."""
    return [replace(s, prompt=replace(s.prompt, kind=task_of(s))) for s in samples]


def tasks_of(runs: Mapping[str, Samples], part: str) -> list[str]:
    """Return the tasks of a part, by name."""
    return sorted({task_of(s) for of in runs.values() for s in of[part]})


def of_task(samples: Sequence[Sample], task: str) -> list[Sample]:
    """Return the samples of one task."""
    return [s for s in samples if task_of(s) == task]


def most_frequent(texts: Sequence[str | None]) -> tuple[str, float]:
    """Return the most frequent of the ``texts`` and its share of all of them."""
    counts = Counter(text for text in texts if text is not None)
    text, count = counts.most_common(1)[0]
    return text, count / len(texts)


def _answers(runs: Mapping[str, Samples], part: str) -> list[str]:
    """Show what can be had in a task without reading its question, and what each policy says."""
    tasks = tasks_of(runs, part)
    some = next(iter(runs.values()))[part]
    keys = [most_frequent([s.prompt.ground_truth for s in of_task(some, task)]) for task in tasks]
    rows = [
        (
            "prompt-blind: always the most frequent key",
            *(f"{share:.3f} ({key})" for key, share in keys),
        )
    ]
    for name, title in METHODS.items():
        if name in runs:
            said = [
                most_frequent([s.judgement.answer for s in of_task(runs[name][part], task)])
                for task in tasks
            ]
            rows.append((title, *(f"{share:.3f} ({text})" for text, share in said)))
    text = (
        "Share of the most frequent answer of each policy by task, and what it is; in the first "
        "row the accuracy of a policy that does not read the prompt:"
    )
    return table(text, tasks, rows)


def _by_task(runs: Mapping[str, Samples], part: str) -> list[str]:
    tasks = tasks_of(runs, part)
    levels, gains = [], []
    for name, title in METHODS.items():
        if name not in runs or len(tasks) < 2:
            continue
        cells, changes = [], []
        for task in tasks:
            own = of_task(runs[name][part], task)
            stated = np.nanmean(as_confidences([s.judgement.confidence for s in own]))
            cells.append(f"{np.mean([s.correct for s in own]):.3f} / {stated:.3f}")
            if name != "base" and "base" in runs:
                before = of_task(runs["base"][part], task)
                changes.append(shown(gain(own, before)))
        levels.append((title, *cells))
        if changes:
            gains.append((title, *changes))
    text = "Accuracy minus that before RL by task, same problems; 95 % intervals over problems:"
    return [
        *table("Accuracy / mean stated confidence by task:", tasks, levels),
        *table(text, tasks, gains),
    ]


def gain(after: Sequence[Sample], before: Sequence[Sample]) -> tuple[float, float, float]:
    """Return the accuracy ``after`` minus that ``before`` on the same problems, in the same order,
    and the ends of its 95 % interval over problems (bootstrap).
    """
    means = []
    for samples in (after, before):
        r = records(samples, np.zeros(len(samples)))
        means.append(by_problem(r, r.correct))
    gaps = means[0] - means[1]
    drawn = np.random.default_rng(0).integers(0, len(gaps), (2000, len(gaps)))
    low, high = np.quantile(gaps[drawn].mean(axis=1), (0.025, 0.975))
    return float(gaps.mean()), float(low), float(high)


def _ranks_by_task(runs: Mapping[str, Samples], part: str) -> list[str]:
    tasks = tasks_of(runs, part)
    rows = []
    for name, title in METHODS.items():
        if name not in runs or len(tasks) < 2:
            continue
        cells = []
        for task in tasks:
            own = of_task(runs[name][part], task)
            nats = [s.measures.reasoning_logprob for s in own]
            known = [i for i, value in enumerate(nats) if value is not None]
            scores = np.array([math.exp(nats[i] or 0.0) for i in known])
            right = np.array([float(own[i].correct) for i in known])
            cells.append(f"{auroc(scores, right):.3f}" if known else "–")
        rows.append((title, *cells))
    return table("AUROC of the reasoning's log-prob, as it is, by task:", tasks, rows)


def _groups(files: Mapping[str, bytes]) -> list[str]:
    """Show how much each training had to learn from. With ``rollout.filter_groups`` a group was
    kept if either block had a gradient.
    """
    rows = []
    for name, title in METHODS.items():
        if f"{name}/metrics.jsonl" not in files:
            continue
        steps = [
            row
            for row in map(json.loads, files[f"{name}/metrics.jsonl"].splitlines())
            if "rollout/prompts_drawn" in row
        ]
        if not steps:
            continue
        drawn = sum(row["rollout/prompts_drawn"] for row in steps)
        kept = drawn - sum(row["rollout/groups_filtered"] for row in steps)
        if all("frac_reward_zero_std" in row for row in steps):
            shares = sum(row["frac_reward_zero_std"] for row in steps)
            informative = f"{kept - shares * kept / len(steps):.0f}"
        else:
            informative = f"{kept}" if name == "grpo" else f"{kept} at most"
        rows.append((title, f"{GROUP_SIZE * drawn}", f"{kept}", informative))
    text = (
        "Groups of the trainings, all steps. Informative: with right and wrong responses, so that "
        "the reasoning has a gradient; of DCPO not recorded. GRPO kept such groups alone, DCPO and "
        "DCPO-proper also those of which only the confidence has a gradient:"
    )
    return table(text, ("responses sampled", "groups trained on", "informative"), rows)


def _steps(files: Mapping[str, bytes]) -> list[str]:
    """Compare the first, middle and last five steps of each training."""
    rows = []
    for name, content in sorted(files.items()):
        method, _, file = name.partition("/")
        if file == "metrics.jsonl":
            steps = [
                row for row in map(json.loads, content.decode().splitlines()) if STEPS[0] in row
            ]  # not step 0's
            middle = len(steps) // 2 - 2
            for label, part in (
                ("first", steps[:5]),
                ("middle", steps[middle : middle + 5]),
                ("last", steps[-5:]),
            ):
                means = [
                    np.nanmean([np.nan if s.get(key) is None else s[key] for s in part])
                    for key in STEPS
                ]
                rows.append(
                    (
                        f"{METHODS[method]}, {label} 5 of {len(steps)}",
                        *(f"{mean:.3f}" for mean in means),
                    )
                )
    text = (
        "Means over five steps of training, of the groups trained on: GRPO's have right and wrong "
        "responses each, the others' need not, so that rows of different methods are no comparison."
    )
    return table(text, STEPS, rows)


def main() -> int:
    """Write the tables; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, help="the evaluated runs to publish first, for instance runs/smollm2"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/lab"), help="where they go (default: %(default)s)"
    )
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    try:
        if args.runs:
            logging.info("%d files packed", pack(args.runs, args.out / RECORDS))
        with tempfile.TemporaryDirectory() as scratch:
            print(tables(args.out / RECORDS, args.out, Path(scratch)))
    except UserError as error:
        print(f"study: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
