"""``dcpo evaluate``: accuracy and calibration of a model on benchmarks, or of responses sampled before."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dcpo.errors import UserError

if TYPE_CHECKING:
    from megatron_dcpo.calibration.evaluate import Generate, Progress
    from megatron_dcpo.calibration.samples import Sample

logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="accuracy and calibration of a model",
        description="Sample a model on benchmarks, judge the responses, and write evaluation.json, samples.jsonl, "
        "diagrams and report.html. With --samples the responses of an earlier evaluation are scored again, no model.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint directory")
    source.add_argument("--samples", metavar="FILE", help="score this samples.jsonl again")
    parser.add_argument("--benchmarks", metavar="A,B", help="names (math500, aime24, ...) or NAME=PATH of a data file")
    parser.add_argument("--out", metavar="RUN", required=True, help="directory to write to")
    parser.add_argument("--repeats", type=_positive, default=4, help="responses per problem (default 4)")
    parser.add_argument("--confidence", default="verbal,token,consistency", help="kinds of confidence to score")
    parser.add_argument("--template", default="paper", help="prompt template: paper, grpo or raw (default paper)")
    parser.add_argument("--limit", type=_positive, help="only the first problems of every benchmark")
    parser.add_argument("--data-dir", metavar="DIR", help="where benchmark files are (default: $DCPO_DATA, else data/)")
    parser.add_argument("--corrections", action="store_true", help="repair documented defects of benchmark data")
    parser.add_argument("--rejudge", action="store_true", help="with --samples: judge the responses anew as well")
    sampling = parser.add_argument_group("sampling (defaults: the paper's evaluation)")
    sampling.add_argument("--temperature", type=float, default=0.7)
    sampling.add_argument("--top-p", type=float, default=0.8)
    sampling.add_argument("--top-k", type=int, default=20, help="0: off")
    sampling.add_argument("--max-tokens", type=_positive, default=3000, help="longest response in tokens")
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--batch-size", type=_positive, default=64, help="responses sampled at a time")
    sampling.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples for 95%% intervals (0: none)")
    parser.add_argument("--json", action="store_true", help="print evaluation.json instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.calibration.evaluate import write_evaluation
    from megatron_dcpo.calibration.scoring import headline, parse_kinds, score_samples
    from megatron_dcpo.cli.report import print_table

    kinds = parse_kinds(args.confidence)
    samples, model = _old_samples(args) if args.samples else _new_samples(args)
    evaluation = score_samples(samples, kinds, model, resamples=args.resamples, seed=args.seed)
    write_evaluation(args.out, evaluation, samples)
    if args.json:
        print(json.dumps(evaluation, indent=1, allow_nan=False, ensure_ascii=False))
        return 0
    names = list(evaluation["benchmarks"])
    rows = {f"{name} {kind}": headline(evaluation, kind, name) for name in names for kind in kinds}
    if len(names) > 1:
        rows |= {f"overall {kind}": headline(evaluation, kind) for kind in kinds}
    print_table(rows, "benchmark")
    print(f"wrote {args.out}")
    return 0


def _old_samples(args: argparse.Namespace) -> tuple[list[Sample], str]:
    """The responses of an earlier evaluation, and the name of the model that gave them if it is known."""
    from megatron_dcpo.calibration.evaluate import rejudge
    from megatron_dcpo.calibration.samples import read_samples

    samples = read_samples(args.samples)
    if not samples:
        raise UserError(f"{args.samples}: no samples in it")
    if args.rejudge:
        samples = rejudge(samples)
    beside = Path(args.samples).with_name("evaluation.json")
    model = json.loads(beside.read_text(encoding="utf-8")).get("model", "") if beside.exists() else ""
    return samples, model


def _new_samples(args: argparse.Namespace) -> tuple[list[Sample], str]:
    """Sample the model on every benchmark and judge."""
    from megatron_dcpo.calibration.evaluate import evaluate_benchmark
    from megatron_dcpo.data.benchmarks import load_benchmark, parse_specs
    from megatron_dcpo.data.prompts import find_template

    if not args.benchmarks:
        raise UserError("--benchmarks is missing; name at least one, for instance --benchmarks math500")
    find_template(args.template)
    # Everything that can be wrong with the data is found before the model is loaded.
    loaded = [load_benchmark(spec, args.data_dir, args.corrections) for spec in parse_specs(args.benchmarks)]
    for warning in (text for benchmark in loaded for text in benchmark.warnings):
        logger.warning(warning)
    tokenizer, generate, eos_ids = _load_engine(args)
    samples: list[Sample] = []
    with _progress() as progress:
        for benchmark in loaded:
            samples += evaluate_benchmark(
                benchmark,
                tokenizer,
                generate,
                eos_ids,
                template=args.template,
                limit=args.limit,
                batch_size=max(1, args.batch_size // args.repeats),
                progress=progress,
            )
    return samples, args.model


def _load_engine(args: argparse.Namespace) -> tuple[Any, Generate, tuple[int, ...]]:
    """The tokenizer, a function that samples ``repeats`` responses per prompt, and the ids that end a response."""
    from transformers import AutoTokenizer

    from megatron_dcpo.rollout import SamplingConfig, TransformersEngine

    engine = TransformersEngine.from_pretrained(args.model, dtype=args.dtype, max_num_seqs=args.batch_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a tokenizer from {args.model}: {' '.join(str(error).split())}") from None
    config = SamplingConfig(
        n=args.repeats,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return tokenizer, lambda prompts: engine.generate(prompts, config), engine.eos_token_ids


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar with time left on a terminal, log lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: logger.info("%s: %d of %d problems", name, done, total)
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns: Sequence[Any] = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int) -> None:
            task = tasks.setdefault(name, None)
            if task is None:
                task = tasks[name] = bars.add_task(name, total=total)
            bars.update(task, completed=done)

        yield show


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
