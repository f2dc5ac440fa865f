"""``dcpo evaluate``: accuracy and calibration of a model on benchmarks, or of responses sampled before."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli.common import add_sandbox_arguments, program_judge, whole
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.confidence import MARKER

if TYPE_CHECKING:
    from megatron_dcpo.data import LoadedBenchmark
    from megatron_dcpo.evaluation.evaluate import Complete, Generate, Progress
    from megatron_dcpo.evaluation.samples import Sample
    from megatron_dcpo.rollout import SamplingConfig
    from megatron_dcpo.types import Prompt

    Render = Callable[[LoadedBenchmark], list[Prompt]]

logger = logging.getLogger(__name__)

KINDS = ("verbal", "token", "token_product", "token_min", "token_mean_logprob", "token_entropy", "consistency")
TOP_LOGPROBS = 20
TESTS_FILE = "tests.jsonl.gz"  # beside samples.jsonl: what judging programs again needs
# What samples depend on. The address of a server, its load and the number of repeats may change between two runs.
_SETTINGS = (
    "template",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "corrections",
    "extra_body",
    "top_logprobs",
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="accuracy and calibration of a model",
        description="Sample a model or a server on benchmarks, judge the responses, and write evaluation.json, "
        "samples.jsonl, diagrams and report.html. With --endpoint every finished sample is on disk at once, and the "
        "same command continues an interrupted evaluation. With --samples the responses of an earlier evaluation are "
        "scored again, no model.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint directory")
    source.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible server, for instance http://host:8000/v1")
    source.add_argument("--samples", metavar="FILE", help="score this samples.jsonl again")
    parser.add_argument("--benchmarks", metavar="A,B", help="names (math500, aime24, ...) or NAME=PATH of a data file")
    parser.add_argument("--out", metavar="RUN", required=True, help="directory to write to")
    parser.add_argument("--repeats", type=whole, default=4, help="responses per problem (default 4)")
    parser.add_argument(
        "--confidence", default="verbal,token,consistency", help=f"kinds of confidence: {', '.join(KINDS)}"
    )
    parser.add_argument("--features", action="store_true", help="keep what dcpo calibrate --method confclass reads")
    parser.add_argument("--posthoc", metavar="FILE", help="score the post-hoc confidence of dcpo calibrate as well")
    parser.add_argument(
        "--marker", type=_marker, help="what opens the confidence line (default <conf>; of --samples: as before)"
    )
    parser.add_argument("--template", default="paper", help="prompt template: paper, grpo or raw (default paper)")
    parser.add_argument("--limit", type=whole, help="only the first problems of every benchmark")
    parser.add_argument("--data-dir", metavar="DIR", help="where benchmark files are (default: $DCPO_DATA, else data/)")
    parser.add_argument("--corrections", action="store_true", help="repair documented defects of benchmark data")
    parser.add_argument("--rejudge", action="store_true", help="with --samples: judge the responses anew as well")
    sampling = parser.add_argument_group("sampling (defaults: the paper's evaluation)")
    sampling.add_argument("--temperature", type=float, default=0.7)
    sampling.add_argument("--top-p", type=float, default=0.8)
    sampling.add_argument("--top-k", type=int, default=20, help="0: off")
    sampling.add_argument("--max-tokens", type=whole, default=3000, help="longest response in tokens")
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--batch-size", type=whole, default=64, help="responses sampled at a time")
    sampling.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    sampling.add_argument(
        "--engine",
        default="auto",
        choices=["auto", "vllm", "transformers"],
        help="what samples --model; auto: vLLM where it is installed and can run the model",
    )
    programs = parser.add_argument_group("programs (code benchmarks)")
    add_sandbox_arguments(programs)
    server = parser.add_argument_group("endpoint")
    server.add_argument("--model-name", help="model to ask the server for (default: the only one it offers)")
    server.add_argument(
        "--api", choices=["chat", "completions"], help="default: completions for --template raw, else chat"
    )
    server.add_argument("--api-key-env", default="OPENAI_API_KEY", help="environment variable that holds the key")
    server.add_argument("--concurrency", type=whole, default=32, help="requests at a time (default 32)")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for one sample")
    server.add_argument("--attempts", type=whole, default=8, help="tries per sample, with growing pauses")
    server.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="added to every request")
    server.add_argument("--fresh", action="store_true", help="drop the samples of an earlier run in --out")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples for 95%% intervals (0: none)")
    parser.add_argument("--json", action="store_true", help="print evaluation.json instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.cli.report import print_table
    from megatron_dcpo.evaluation.evaluate import write_evaluation
    from megatron_dcpo.evaluation.posthoc import Posthoc
    from megatron_dcpo.evaluation.scoring import headline, parse_kinds, score_samples

    kinds = parse_kinds(args.confidence)
    predictor = Posthoc.load(args.posthoc) if args.posthoc else None
    args.features |= predictor is not None and predictor.method == "confclass"
    args.top_logprobs = TOP_LOGPROBS if args.features or "token_entropy" in kinds else 0
    args.marker = args.marker or (_beside(args.samples).get("marker") if args.samples else None) or MARKER
    samples, model = _old_samples(args) if args.samples else _new_samples(args)
    if predictor is not None:
        samples = predictor.apply(samples)
        kinds = tuple(dict.fromkeys((*kinds, "posthoc")))
    evaluation = score_samples(samples, kinds, model, resamples=args.resamples, seed=args.seed)
    if args.marker != MARKER:
        evaluation["marker"] = args.marker
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
    from megatron_dcpo.evaluation.judges import is_code, read_tests, write_tests
    from megatron_dcpo.evaluation.samples import read_samples

    samples = read_samples(args.samples)
    if not samples:
        raise UserError(f"{args.samples}: no samples in it")
    keys = {sample.ground_truth for sample in samples if is_code(sample)}
    tests_file = Path(args.samples).with_name(TESTS_FILE)
    tests = read_tests(tests_file, keys) if keys and (args.rejudge or tests_file.exists()) else {}
    if tests:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        write_tests(tests, Path(args.out) / TESTS_FILE)
    if args.rejudge:
        samples = _judged_anew(samples, tests, args)
    return samples, _beside(args.samples).get("model", "")


def _beside(samples: str) -> dict[str, Any]:
    """The evaluation.json beside old samples, nothing where there is none."""
    path = Path(samples).with_name("evaluation.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _judged_anew(samples: list[Sample], tests: dict[str, bytes], args: argparse.Namespace) -> list[Sample]:
    """Mathematics and programs each by their judge, in the order given."""
    from megatron_dcpo.evaluation.evaluate import rejudge
    from megatron_dcpo.evaluation.judges import equivalent_of, is_code, judge_of

    judged: dict[int, Sample] = {}
    for of_kind in ({}, tests):
        places = [place for place, sample in enumerate(samples) if is_code(sample) is bool(of_kind)]
        if places:
            judge = judge_of(of_kind, args.marker, program_judge(args) if of_kind else None)
            found = rejudge([samples[p] for p in places], judge, equivalent_of(of_kind))
            judged |= dict(zip(places, found, strict=True))
    return [judged[place] for place in range(len(samples))]


def _new_samples(args: argparse.Namespace) -> tuple[list[Sample], str]:
    """Sample the model or the server on every benchmark and judge."""
    from megatron_dcpo.data.benchmarks import load_benchmark, parse_specs
    from megatron_dcpo.data.prompts import find_template
    from megatron_dcpo.evaluation.evaluate import evaluate_benchmark
    from megatron_dcpo.evaluation.judges import equivalent_of, judge_of, write_tests
    from megatron_dcpo.evaluation.samples import Journal

    if not args.benchmarks:
        raise UserError("--benchmarks is missing; name at least one, for instance --benchmarks math500")
    find_template(args.template)
    # Everything that can be wrong with the data is found before the model is loaded.
    loaded = [load_benchmark(spec, args.data_dir, args.corrections) for spec in parse_specs(args.benchmarks)]
    for warning in (text for benchmark in loaded for text in benchmark.warnings):
        logger.warning(warning)
    tests = {benchmark.name: _tests_of(benchmark) for benchmark in loaded}
    # A machine that cannot run programs is found before the model is loaded as well.
    programs = program_judge(args) if any(tests.values()) else None
    model, render, complete = _server(args) if args.endpoint else _local_model(args)
    settings = {name: getattr(args, name) for name in _SETTINGS} | {"model": model}
    if args.marker != MARKER:  # not in the settings of evaluations that know no other
        settings["marker"] = args.marker
    samples: list[Sample] = []
    # A model directory may hold other weights under the same name: only a server's samples are taken up again.
    with Journal(args.out, settings, fresh=args.fresh or not args.endpoint) as journal, _progress() as progress:
        if any(tests.values()):
            write_tests(dict(ChainMap(*tests.values())), Path(args.out) / TESTS_FILE)
        for benchmark in loaded:
            samples += evaluate_benchmark(
                benchmark,
                render(benchmark),
                complete,
                repeats=args.repeats,
                judge=judge_of(tests[benchmark.name], args.marker, programs),
                equivalent=equivalent_of(tests[benchmark.name]),
                journal=journal,
                keep_features=args.features,
                progress=progress,
            )
    return samples, model


def _tests_of(benchmark: LoadedBenchmark) -> dict[str, bytes]:
    """The packed tests of a code benchmark by their key, nothing for others."""
    return {record.answer: record.tests for record in benchmark.records if record.tests is not None}


def _sampling(args: argparse.Namespace) -> SamplingConfig:
    from megatron_dcpo.rollout import SamplingConfig

    return SamplingConfig(
        n=args.repeats,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        seed=args.seed,
        raw_logprobs=True,
        top_logprobs=args.top_logprobs,
    )


def _server(args: argparse.Namespace) -> tuple[str, Render, Complete]:
    """Name of the model, the prompts of a benchmark as messages, and the samples from ``--endpoint``."""
    from megatron_dcpo.data.datasets import message_prompts
    from megatron_dcpo.data.prompts import find_template
    from megatron_dcpo.rollout.openai_client import Endpoint, served_model

    api_key = os.environ.get(args.api_key_env) or None
    model = args.model_name or served_model(args.endpoint, api_key)
    endpoint = Endpoint(
        args.endpoint,
        model,
        _sampling(args),
        api=args.api or ("chat" if find_template(args.template).chat else "completions"),
        api_key=api_key,
        concurrency=args.concurrency,
        timeout=args.timeout,
        attempts=args.attempts,
        extra_body=args.extra_body,
    )

    def render(benchmark: LoadedBenchmark) -> list[Prompt]:
        return message_prompts(benchmark.records, args.template, args.limit, args.marker)

    return model, render, endpoint.complete


def _local_model(args: argparse.Namespace) -> tuple[str, Render, Complete]:
    """The same for a checkpoint directory, sampled in this process."""
    from megatron_dcpo.data import render_prompts
    from megatron_dcpo.evaluation.evaluate import complete_in_batches
    from megatron_dcpo.judging.token_bytes import token_bytes

    tokenizer, generate, eos_ids = _load_engine(args)
    complete = complete_in_batches(
        generate, token_bytes(tokenizer), eos_ids, batch_size=max(1, args.batch_size // args.repeats)
    )

    def render(benchmark: LoadedBenchmark) -> list[Prompt]:
        return render_prompts(
            benchmark.records,
            tokenizer,
            args.template,
            limit=args.limit,
            marker=args.marker,
            source=benchmark.name,
        )

    return args.model, render, complete


def _load_engine(args: argparse.Namespace) -> tuple[Any, Generate, tuple[int, ...]]:
    """The tokenizer, a function that samples ``repeats`` responses per prompt, and the ids that end a response."""
    from transformers import AutoTokenizer

    from megatron_dcpo.rollout import Engine, TransformersEngine, choose_engine

    if choose_engine(args.engine, args.model) == "vllm":
        from megatron_dcpo.rollout.vllm_engine import VllmEngine, VllmOptions

        options = VllmOptions(dtype=args.dtype, max_num_seqs=args.batch_size, raw_logprobs=True, seed=args.seed)
        engine: Engine = VllmEngine(args.model, options)
    else:
        engine = TransformersEngine.from_pretrained(args.model, dtype=args.dtype, max_num_seqs=args.batch_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a tokenizer from {args.model}: {' '.join(str(error).split())}") from None
    sampling = _sampling(args)
    return tokenizer, lambda prompts: engine.generate(prompts, sampling), engine.eos_token_ids


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar with time left on a terminal, log lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: logger.info("%s: %d of %d samples", name, done, total)
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


def _marker(text: str) -> str:
    if not text.strip() or "\n" in text:
        raise argparse.ArgumentTypeError("must be one line and not blank")
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
