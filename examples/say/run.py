"""A model that learns to state in its text what can be fitted on its own answers: ``make say``.

    python examples/say/run.py [--model DIR] [--fit FILE] [--test FILE] [--out runs/say]
        [--sampling OPTIONS] [--adapter OPTIONS] [--say OPTIONS]

The model answers the problems of --fit and of --test. On the first answers a confidence is fitted
in two steps. An adapter learns it behind the tag, taught by a logistic regression on log-prob,
length, kind and the model's own states. Then the model learns to write its own answers again, each
with the mean of the adapter's numbers. It answers --test once more, and what is printed says
whether it was worth it: the Brier scores of what it stated before and states now, of a lookup of
the kinds of problem and of the bar, and the accuracy before and after. docs/say.md has more. What
is in --out is kept, and the same command goes on with it; another one is refused.

--sampling are options of dcpo evaluate, --adapter and --say of dcpo sft, whose template and
thinking are those of --sampling; quotes as in a shell ("model.adapter.layers='last 6'"). The
defaults are for the quickstart's policy, five minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.data.benchmarks import load_benchmark
from megatron_dcpo.data.datasets import KIND_COLUMNS
from megatron_dcpo.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
DCPO = (sys.executable, "-m", "megatron_dcpo")
SAMPLING = "--template raw --temperature 1.0 --top-p 1.0 --top-k 0 --max-tokens 32 --batch-size 512"
ADAPTER = (
    "model.adapter.rank=16 model.params_dtype=fp32 optimizer.lr=1e-3 training.epochs=6 "
    "data.examples_per_step=128 training.micro_batch_size=256 logging.to=[]"
)
SAY = (
    "model.params_dtype=fp32 data.max_length=64 optimizer.lr=3e-4 training.epochs=3 "
    "data.examples_per_step=128 training.micro_batch_size=128 logging.to=[]"
)
OWN_ANSWERS = "own_answers.jsonl"
# what each result in --out is made of
_FIT = ("model", "fit", "sampling")
_BEFORE = ("model", "test", "sampling")
_TAUGHT = (*_FIT, "adapter")
_SAID = (*_TAUGHT, "say")
MADE_OF = {
    "fit": _FIT,
    "before": _BEFORE,
    "bar.npz": _FIT,
    "taught": _TAUGHT,
    OWN_ANSWERS: _TAUGHT,
    "read_fit.jsonl": _TAUGHT,
    "read_before.jsonl": (*_TAUGHT, "test"),
    "said": _SAID,
    "bar": (*_FIT, "test"),
    "read": (*_TAUGHT, "test"),
    "after": (*_SAID, "test"),
}
INPUTS = "made_of.json"


@dataclass(frozen=True)
class Answers:
    """Answers to the test problems, of the model before or after: where they are scored, the kind
    of confidence, and how it is called.
    """

    directory: Path
    kind: str
    name: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(QUICKSTART / "policy"))
    parser.add_argument("--fit", default=str(QUICKSTART / "data" / "train.jsonl"))
    parser.add_argument("--test", default=str(QUICKSTART / "data" / "heldout.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("runs/say"))
    parser.add_argument("--sampling", default=SAMPLING)
    parser.add_argument("--adapter", default=ADAPTER)
    parser.add_argument("--say", default=SAY)
    args = parser.parse_args(argv)
    out = args.out
    check_same_prompts(shlex.split(args.say))
    check_problems(args.fit, args.test)
    keep_inputs(out, vars(args))
    model = ["--model", args.model]
    sampling = shlex.split(args.sampling)
    for name, problems in (("fit", args.fit), ("before", args.test)):
        evaluate(out / name, [*model, *sampling, *asked(problems), "--keep", "states"])
    samples = out / "fit" / "samples.jsonl"
    calibrate(out / "bar.npz", ["--samples", samples, "--held-out", 0, "--features", "task"])
    learn_behind_the_tag(out, model, samples, shlex.split(args.adapter))
    learn_to_say_it(out, args.model, shlex.split(args.say))
    before = out / "before" / "samples.jsonl"
    evaluate(out / "bar", ["--samples", before, "--calibrator", out / "bar.npz"])
    evaluate(out / "read", ["--samples", out / "read_before.jsonl", "--confidence", "posthoc"])
    evaluate(out / "after", ["--model", out / "said" / "policy", *sampling, *asked(args.test)])
    show(
        Answers(out / "before", "verbal", "stated before"),
        Answers(out / "after", "verbal", "stated after"),
        Answers(out / "after", "lookup", "lookup of kinds, after"),
        Answers(out / "read", "posthoc", "adapter's mean, before"),
        Answers(out / "bar", "posthoc", "the bar, before"),
    )
    return 0


def check_same_prompts(options: Sequence[str]) -> None:
    """End if the answers would be learned behind other prompts than they were given to."""
    for option in options:
        if option.startswith(("data.template=", "data.thinking=")):
            raise SystemExit(f"--say: {option} is not wanted, it is that of --sampling; remove it")


def check_problems(fit: str, test: str) -> None:
    """End if the problems of a file name no kinds, which the regression reads, or if some are in
    both files.
    """
    texts = []
    for option, problems in (("--fit", fit), ("--test", test)):
        try:
            records = load_benchmark(f"problems={problems}").records
        except UserError as error:
            raise SystemExit(f"{option}: {error}") from None
        if all(record.kind is None for record in records):
            raise SystemExit(
                f"{option} {problems}: the problems name no kinds; add one of the columns "
                f"{', '.join(KIND_COLUMNS)}, the same word for all if there are none"
            )
        texts.append({record.problem for record in records})
    both = texts[0] & texts[1]
    if both:
        raise SystemExit(
            f"{len(both)} problems of --test {test} are in --fit {fit} too, so that their scores "
            f"would say nothing; take them out of one ({min(both):.60})"
        )


def keep_inputs(out: Path, options: dict[str, Any]) -> None:
    """Write what the results in ``out`` are made of; end if one that is there was made of something
    else.
    """
    inputs = {name: str(options[name]) for name in ("sampling", "adapter", "say")}
    for name in ("model", "fit", "test"):
        inputs[name] = f"{options[name]} {content(Path(options[name]))}"
    path = out / INPUTS
    made = json.loads(path.read_text()) if path.is_file() else {}
    for result, names in MADE_OF.items():
        now = {name: inputs[name] for name in names}
        before = made.get(result, {}) if (out / result).exists() else now
        for name in names:
            if before.get(name) != now[name]:
                raise SystemExit(
                    f"{out / result} was made with --{name} {before.get(name, '(not known)')}, now "
                    f"it is {now[name]}; give another --out, or remove it and what follows from it"
                )
        made[result] = now
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")


def content(path: Path) -> str:
    """Return a digest of a file, or of the sizes and times of a model's files."""
    known = [path.read_bytes()] if path.is_file() else []
    for file in sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json")):
        known.append(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return hashlib.sha256(b"\n".join(known)).hexdigest()[:8]


def learn_behind_the_tag(
    out: Path, model: Sequence[str], samples: Path, options: Sequence[str]
) -> None:
    """Fit the adapter, and read it behind the answers to fit and to test."""
    taught = out / "taught"
    calibrate(
        taught,
        [
            *("--kind", "adapter", "--target", "text", "--teacher", "stack", *model),
            *("--samples", samples, "--held-out", 0, "--resume", "auto", *options),
        ],
        result=taught / "confidence.json",
    )
    read_as = [
        option
        for option in options
        if option.startswith(("model.params_dtype=", "data.max_length="))
    ]
    rows = ["--demonstrations", out / OWN_ANSWERS]
    calibrate(out / "read_fit.jsonl", ["--apply", taught, *rows, "--samples", samples, *read_as])
    before = out / "before" / "samples.jsonl"
    calibrate(out / "read_before.jsonl", ["--apply", taught, "--samples", before, *read_as])


def learn_to_say_it(out: Path, model: str, options: Sequence[str]) -> None:
    """Train the model on its own answers to fit, each with the adapter's number for its own."""
    if (out / "said" / "policy").is_dir():
        return
    asked_with = json.loads((out / "fit" / "settings.json").read_text())
    own = [f"run_dir={out / 'said'}", f"model.path={model}", f"data.path={out / OWN_ANSWERS}"]
    own.append(f"data.template={asked_with['template']}")
    own.append(f"data.thinking={asked_with.get('thinking', 'off')}")
    config = QUICKSTART / "sft.yaml"
    run("sft", "--config", config, *own, *options, "training.resume=auto")


def asked(problems: str) -> list[str]:
    """Return the options that have every problem of a file answered twice."""
    return ["--benchmarks", f"problems={problems}", "--repeats", "2"]


def evaluate(out: Path, options: Sequence[object]) -> None:
    """Run ``dcpo evaluate``, unless it has been run."""
    if not (out / "evaluation.json").is_file():
        run("evaluate", "--out", out, *options)


def calibrate(out: Path, options: Sequence[object], result: Path | None = None) -> None:
    """Run ``dcpo calibrate``, unless its ``result`` is there."""
    if not (result or out).is_file():
        run("calibrate", "--out", out, *options)


def run(*words: object) -> None:
    """Run a command of dcpo; end as it does if it fails, also at Ctrl-C, when it saves what it
    has.
    """
    with subprocess.Popen([*DCPO, *map(str, words)]) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            status = process.wait()
    if status:
        raise SystemExit(status)


def show(*rows: Answers) -> None:
    """Print accuracy and scores of the answers, with 95 % intervals over problems."""
    print(f"\n{'confidence':23} {'accuracy':>22} {'Brier':>22} {'AUROC':>6} {'within kinds':>12}")
    notes = []
    for row in rows:
        found = json.loads((row.directory / "evaluation.json").read_text())
        scores = found["benchmarks"]["problems"]
        of_kind = scores[row.kind]
        print(
            f"{row.name:23} {interval(scores, 'accuracy'):>22} "
            f"{interval(scores, row.kind, 'brier'):>22} {number(of_kind['auroc']):>6} "
            f"{number(of_kind['auroc_within']):>12}"
        )
        without = of_kind["n"] - of_kind["n_parsed"]
        if without:
            notes.append(f"{row.name}: without {without} of {of_kind['n']} answers, that have none")
    print("".join(f"{note}\n" for note in notes), end="")
    print(
        "It was worth it if what is stated after has a Brier score below the lookup's,\n"
        "and the accuracy is what it was."
    )


def interval(scores: dict[str, Any], *path: str) -> str:
    """Return a score and its interval as text."""
    value: Any = scores
    ends: Any = scores["ci95"]
    for key in path:
        value = value[key]
        ends = ends[key]
    low, high = ends
    return f"{number(value)} [{number(low)}, {number(high)}]"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
