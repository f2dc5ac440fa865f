"""What becomes of a confidence when a policy is distilled: pupils that learn from a larger teacher,
with the confidence block distilled too, left to its own score, or left alone
(``docs/lab/distilled.md``, whose design was committed before the first run).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.fitted import Records, Run, rows_of
from lab.price import within_problems
from lab.results import interval, read_archive, write_json
from lab.testgrid import DRAWS, EXAMPLES, METHODS, Cell, Draw, Lab
from lab.testtables import SHOWN, TITLES, load, scores, table
from megatron_dcpo.calibration.diagrams import PALETTE
from megatron_dcpo.calibration.diagrams import saved_figure as figure
from megatron_dcpo.evaluation.samples import read_samples

RECORDS = "distilled_records.tar.xz"
TEACHER = Cell("wide.1", "dcpo_proper", 1)
PUPILS = tuple(f"small.{number}" for number in range(1, 4))
ARMS = ("dcpo_proper", "distilled", "distilled_both", "distilled_alone", "imitation")
ROWS = ("base", *ARMS)
STEPS, STEPS_OF_TEACHER = 300, 500
RESPONSES = STEPS * 256  # of an arm, and of the teacher that is imitated
EARLY = (50, 60)  # the points of a curve that are the means of steps 41 to 60


@dataclass(frozen=True)
class Distillation(Lab):
    """The cells of the pupils: ``teacher`` is the directory of the policy that they learn from,
    ``imitated`` the file of its responses.
    """

    teacher: Path = Path()
    imitated: Path = Path()

    def train_command(self, cell: Cell) -> list[str]:
        """Return ``dcpo train`` of a cell with its teacher, or ``dcpo sft`` on the teacher's
        responses.
        """
        if cell.method == "imitation":
            return [
                *("sft", "--config", str(EXAMPLES / "sft.yaml"), "--resume", "auto"),
                *(f"run_dir={self.directory(cell)}", f"seed={cell.seed}"),
                *(f"model.path={self.policy(cell)}", f"data.path={self.imitated}"),
                "model.transformer_impl=local",
            ]
        command = super().train_command(cell)
        if any("distill_coef" in override for override in METHODS[cell.method].overrides):
            command.append(f"objective.teacher={self.teacher}")
        return command


def train(out: Path, jobs: int) -> None:
    """Train and sample the teacher, then every pupil under every arm; what is finished is kept.
    Raises :class:`UserError`.
    """
    draws = MappingProxyType({"test": DRAWS["test"]})
    of_teacher = Lab(out.resolve(), jobs, steps=STEPS_OF_TEACHER, draws=draws)
    of_teacher.run([TEACHER])
    imitated = out.resolve() / "imitated.jsonl"
    if not imitated.is_file():
        write_imitated(of_teacher, imitated)
    pupils = Distillation(
        out.resolve(),
        jobs,
        steps=STEPS,
        draws=draws,
        teacher=of_teacher.directory(TEACHER) / "policy",
        imitated=imitated,
    )
    pupils.run([Cell(pupil, arm, seed=1) for pupil in PUPILS for arm in ROWS])


def write_imitated(lab: Lab, file: Path) -> None:
    """Sample the teacher on the training problems and write its first ``RESPONSES`` responses, all
    of them as they are, in the order of their numbers: every problem once before any comes again.
    """
    problems = sum(1 for _ in (lab.data / "train.jsonl").open())
    repeats = -(-RESPONSES // problems)
    out = lab.directory(TEACHER) / "responses" / "train"
    if not (out / "evaluation.json").is_file():
        whole = replace(lab, problems=problems)
        lab.call(lab.directory(TEACHER), whole.sample_command(TEACHER, out, Draw("train", repeats)))
    samples = sorted(read_samples(out / "samples.jsonl"), key=lambda one: one.response.sample_index)
    rows = [
        json.dumps({"problem": one.prompt.problem, "response": one.response.text})
        for one in samples[:RESPONSES]
    ]
    file.write_text("\n".join(rows) + "\n")


def tables(archive: Path, out: Path) -> dict[str, Any]:
    """Write ``distilled.json`` and ``distilled_tables.md`` from the records; return the former."""
    runs = load(archive)
    teacher = runs[_key(TEACHER.policy)][TEACHER.method]
    curves = _curves(archive)
    result: dict[str, Any] = {"teacher": _values(teacher, teacher)}
    for arm in ROWS:
        of_pupils = [runs[_key(pupil)][arm] for pupil in PUPILS if arm in runs[_key(pupil)]]
        result[arm] = [_values(run, teacher) for run in of_pupils]
        result[f"miss_of_{arm}"] = float(np.mean([run["bias"] - run["gap"] for run in result[arm]]))
        result[f"slope_of_{arm}"] = slope(result[arm])
        result[f"slope_beyond_teacher_of_{arm}"] = slope(result[arm], result["teacher"])
    with_own_score = result["distilled"]
    for arm in ("distilled_both", "imitation"):
        result[f"bias_of_{arm}_beyond_distilled"] = [
            run["bias"] - other["bias"]
            for run, other in zip(result[arm], with_own_score, strict=True)
        ]
    result["early_accuracy"] = {
        arm: [_early(curves[pupil, arm]) for pupil in PUPILS if (pupil, arm) in curves]
        for arm in ARMS
    }
    result["curves"] = {
        f"{pupil}/{arm}": curve for (pupil, arm), curve in sorted(curves.items()) if arm in ARMS
    }
    write_json(out / "distilled.json", result)
    (out / "distilled_tables.md").write_text(_markdown(result))
    draw(result, out / "distilled.png")
    return result


def bias(r: Records) -> float:
    """Return the mean of the confidences that are stated minus the accuracy of the same answers."""
    known = ~np.isnan(r.confidence)
    return float((r.confidence[known] - r.correct[known]).mean())


def slope(
    of_pupils: Sequence[Mapping[str, Any]], teacher: Mapping[str, Any] | None = None
) -> float:
    """Return the slope of the least squares line of the bias, less that of the ``teacher`` if there
    is one, over the difference of the accuracies, over types and pretrainings.
    """
    points = []
    for run in of_pupils:
        for kind, (gap, off) in run["by_type"].items():
            off_of_teacher = 0.0 if teacher is None else teacher["by_type"][kind][1]
            points.append((gap, off - off_of_teacher))
    x, y = np.array(points).T
    return float(np.polyfit(x, y, deg=1)[0])


def _key(policy: str) -> tuple[str, int, int]:
    family, _, number = policy.partition(".")
    return family, int(number), 1


def _values(run: Run, teacher: Run) -> dict[str, Any]:
    """Return a policy's scores, its bias, and the teacher's accuracy minus its own (``gap``); by
    type, (gap, bias).
    """
    r, of_teacher = run["test"], teacher["test"]
    by_type = {}
    for kind in np.unique(r.kind):
        part, same = rows_of(r, r.kind == kind), of_teacher.correct[of_teacher.kind == kind]
        by_type[str(kind)] = (float(same.mean() - part.correct.mean()), bias(part))
    found = scores(run)
    return {
        **{name: found[name] for name in SHOWN},
        "auroc_within_problem": within_problems(r),
        "stated": float(np.nanmean(r.confidence)),
        "bias": bias(r),
        "gap": float(of_teacher.correct.mean() - r.correct.mean()),
        "by_type": by_type,
    }


def _curves(archive: Path) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Return step, accuracy and mean confidence along the training of each pupil and arm."""
    curves = {}
    for path, content in read_archive(archive).items():
        policy, method, _, file = path.split("/")
        if file != "curve.csv" or method == "imitation":
            continue
        curves[policy, method] = [
            {
                "step": int(row["step"]),
                "accuracy": float(row["reward/accuracy"]),
                "stated": float(row["confidence/mean"]),
            }
            for row in csv.DictReader(io.StringIO(content.decode()))
        ]
    return curves


def _early(curve: Sequence[Mapping[str, float]]) -> float:
    return float(np.mean([point["accuracy"] for point in curve if point["step"] in EARLY]))


def _markdown(result: Mapping[str, Any]) -> str:
    columns = (*SHOWN, "auroc_within_problem", "stated", "bias", "gap")
    lines = [
        "# Tables: what becomes of a confidence when a policy is distilled",
        "",
        f"By `python -m lab distilled` from `{RECORDS}`; the design is in",
        "[distilled.md](distilled.md).",
        "",
    ]
    teacher = result["teacher"]
    rows = [("teacher", "1", *(f"{teacher[key]:.4f}" for key in columns))]
    for arm in ROWS:
        means = [f"{np.mean([run[key] for run in result[arm]]):.4f}" for key in columns]
        rows.append((TITLES[arm], str(len(result[arm])), *means))
    text = (
        "Means over the n pretrainings, test problems. `bias` is the mean stated confidence minus "
        "the accuracy; `gap` is the teacher's accuracy minus the policy's."
    )
    lines += table(text, ("n", *columns), rows)
    rows = []
    for arm in ROWS:
        misses = [run["bias"] - run["gap"] for run in result[arm]]
        rows.append(
            (
                TITLES[arm],
                *(" ".join(f"{run[key]:+.3f}" for run in result[arm]) for key in ("bias", "gap")),
                interval(misses).shown(3),
                f"{result[f'slope_of_{arm}']:+.2f}",
                interval([run["stated"] - teacher["stated"] for run in result[arm]]).shown(3),
                f"{result[f'slope_beyond_teacher_of_{arm}']:+.2f}",
            )
        )
    text = (
        "By pretraining. `miss` is bias minus gap, ± for other pretrainings (Student's t); `slope` "
        "is that of the bias over the gap, twelve pairs of a type and a pretraining. Seen "
        "afterwards: `stated beyond the teacher` is the mean stated confidence minus the "
        "teacher's, and `slope beyond the teacher` that of the bias less the teacher's own."
    )
    beyond = ("stated beyond the teacher", "slope beyond the teacher")
    lines += table(text, ("bias", "gap", "miss", "slope", *beyond), rows)
    early = result["early_accuracy"]
    rows = [(TITLES[arm], *(f"{value:.4f}" for value in early[arm])) for arm in ARMS if early[arm]]
    lines += table("Accuracy of the training samples of steps 41 to 60:", PUPILS, rows)
    return "\n".join(lines)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the bias over the teacher's lead, by type and pretraining, and what the arms of RL state
    while they are trained.
    """
    with figure(path, columns=2, width=4.6) as (over_gap, over_steps):
        for number, arm in enumerate(ARMS):
            points = [point for run in result[arm] for point in run["by_type"].values()]
            gaps, biases = np.array(points).T
            over_gap.plot(gaps, biases, "o", ms=3.5, color=PALETTE[number], label=TITLES[arm])
        over_gap.axline((0, 0), slope=1, color="#777777", lw=0.8)
        over_gap.axhline(0, color="#777777", lw=0.8)
        over_gap.set(xlabel="teacher's accuracy minus the pupil's", ylabel="stated minus accuracy")
        over_gap.set(title="test problems, by type")
        for number, arm in enumerate(ARMS[:-1]):
            curves = [result["curves"][f"{pupil}/{arm}"] for pupil in PUPILS]
            steps = [point["step"] for point in curves[0]]
            for key, style in (("stated", "-"), ("accuracy", ":")):
                means = np.mean([[point[key] for point in curve] for curve in curves], axis=0)
                over_steps.plot(steps, means, style, color=PALETTE[number])
        over_steps.axhline(result["teacher"]["stated"], color="#777777", lw=0.8)
        over_steps.set(xlabel="step", ylim=(0.3, 1.0), title="solid: stated; dotted: accuracy")
        over_gap.legend(fontsize=6.5)
