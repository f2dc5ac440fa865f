"""``dcpo evaluate``: accuracy and calibration of a model on benchmarks, or of earlier responses.

Most flags are shorthands for options (``evaluate_options.SHORTHANDS``), which may be written as
overrides as well: ``--repeats 8`` is ``evaluation.samples=8``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, add_judging_arguments, add_kinds_argument, positive_int
from megatron_dcpo.cli.evaluate_options import (
    check_marker,
    check_options_of_samples,
    check_options_of_source,
    check_scores_are_judged,
    overrides_of,
)
from megatron_dcpo.cli.evaluation_tables import print_evaluation
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.text import parse_json, printable

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.config.evaluation_sections import EvaluateConfig
    from megatron_dcpo.evaluation.evaluate import Progress

logger = logging.getLogger(__name__)

KINDS = (
    "verbal",
    "token",
    "token_product",
    "token_min",
    "token_mean_logprob",
    "token_entropy",
    "consistency",
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help=VERBS["evaluate"],
        description="Sample a model or a server on benchmarks, judge the responses, and write "
        "evaluation.json, samples.jsonl, diagrams and report.html. Every finished sample is on "
        "disk at once, and the same command continues an interrupted evaluation. With --samples "
        "the responses of an earlier evaluation are scored again, without a model. On several "
        "GPUs: dcpo launch N -- evaluate --model DIR ... Flags are shorthands for options "
        "(docs/options.md#dcpo-evaluate), which may be given as overrides too.",
        argument_default=argparse.SUPPRESS,  # each option has its own default
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="options, for instance judging.test_seconds=30",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model", metavar="DIR", help="Hugging Face checkpoint directory, or name on the hub"
    )
    parser.add_argument(
        "--adapter", metavar="DIR", help="adapter in PEFT's format that is added to --model"
    )
    source.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible server, for instance http://host:8000/v1",
    )
    source.add_argument(
        "--samples",
        metavar="FILE",
        help="score the samples in this samples.jsonl again, or another tool's log "
        "(docs/elsewhere.md), or a table",
    )
    parser.add_argument(
        "--columns",
        metavar="OURS=THEIRS,...",
        help="with --samples: columns of a table, correct=NAME, confidence=NAME; text, problem, "
        "group, task, kind; verl, trl, lighteval or verifiers: theirs",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read the sections model, data, rollout, judging and evaluation of a configuration",
    )
    parser.add_argument(
        "--as-trained",
        metavar="CONFIG",
        help="prompt and judge as in that run: use its section judging, template, thinking and "
        "longest response, the verifiers and templates of its sources, and with --endpoint its "
        "tokenizer",
    )
    parser.add_argument(
        "--benchmarks",
        metavar="A,B",
        help="names (math500, aime24, ...) or NAME=PATH of a data file",
    )
    parser.add_argument("--out", metavar="RUN", required=True, help="directory to write to")
    parser.add_argument(
        "--fresh", action="store_true", help="drop the samples of an earlier evaluation in --out"
    )
    parser.add_argument(
        "--repeats", type=positive_int, help="responses per problem (default 4; greedy 1)"
    )
    parser.add_argument(
        "--confidence",
        help=f"kinds, comma separated (default verbal,token,consistency): {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--features",
        action="store_true",
        help="keep the features that dcpo calibrate --kind confclass reads",
    )
    parser.add_argument(
        "--calibrator",
        "--posthoc",
        metavar="FILE",
        help="also score the post-hoc confidence that dcpo calibrate has fitted",
    )
    add_kinds_argument(parser)
    parser.add_argument(
        "--marker",
        type=_marker,
        help="text that opens the confidence line (default <conf>; with --samples: as before)",
    )
    parser.add_argument(
        "--template",
        help="prompt template: paper, abstain, grpo, chat, raw, or my_prompt.py:render (default "
        "paper)",
    )
    parser.add_argument(
        "--thinking",
        choices=["off", "on", "auto"],
        help="for models that think: off, on, or auto, the chat template's choice (default off)",
    )
    parser.add_argument(
        "--limit", type=positive_int, help="only the first problems of every benchmark"
    )
    parser.add_argument(
        "--rejudge", action="store_true", help="with --samples: also judge the responses again"
    )
    _add_sampling_arguments(
        parser.add_argument_group("sampling (defaults: the paper's evaluation)")
    )
    add_judging_arguments(parser.add_argument_group("judging"))
    _add_server_arguments(parser.add_argument_group("endpoint"))
    parser.add_argument(
        "--resamples",
        type=int,
        help="bootstrap resamples for 95%% intervals (default 1000, 0: none)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="print evaluation.json instead of a table",
    )
    parser.argument_default = None  # of the arguments that every verb has
    parser.set_defaults(run=run)


def _add_sampling_arguments(sampling: argparse._ArgumentGroup) -> None:
    sampling.add_argument("--temperature", type=float, help="default 0.7; 0: greedy")
    sampling.add_argument("--top-p", type=float, help="default 0.8")
    sampling.add_argument("--top-k", type=int, help="0: off (default 20)")
    sampling.add_argument(
        "--max-tokens", type=positive_int, help="longest response in tokens (default 3000)"
    )
    sampling.add_argument("--seed", type=int, help="default 0")
    sampling.add_argument(
        "--batch-size",
        type=positive_int,
        help="responses sampled at a time (default 64; with vLLM on a GPU 512)",
    )
    sampling.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        type=str,
        help="element type of --model (default auto: bfloat16 on a GPU, otherwise float32)",
    )
    sampling.add_argument(
        "--agent",
        metavar="FILE:NAME",
        help="with --model: an agent that makes the responses, my_agent.py:run (docs/agents.md)",
    )
    sampling.add_argument(
        "--agent-python",
        metavar="PYTHON",
        help="with --agent: the Python in which it runs (default this one)",
    )
    sampling.add_argument(
        "--command",
        metavar="PROGRAM",
        help="with --model: a program that is an agent",
    )
    sampling.add_argument(
        "--engine",
        choices=["auto", "vllm", "transformers"],
        help="engine that samples --model (default auto: vLLM on a GPU if it is installed and can "
        "run the model)",
    )


def _add_server_arguments(server: argparse._ArgumentGroup) -> None:
    server.add_argument(
        "--model-name", help="name of the model on the server (default: the only one it offers)"
    )
    server.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="render the prompts here, as training does, and send token ids (completions)",
    )
    server.add_argument(
        "--api",
        choices=["chat", "completions"],
        help="default: completions for --template raw, otherwise chat",
    )
    server.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable of the key (default OPENAI_API_KEY)",
    )
    server.add_argument("--concurrency", type=positive_int, help="requests at a time (default 32)")
    server.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait for one sample (default 600)"
    )
    server.add_argument(
        "--attempts", type=positive_int, help="tries per sample, with growing pauses (default 8)"
    )
    server.add_argument(
        "--extra-body", type=_json_object, metavar="JSON", help="fields added to every request"
    )


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.evaluation.evaluation_run import run_evaluation
    from megatron_dcpo.evaluation.foreign import parse_columns

    signals.exit_with_launcher()
    arguments = vars(args)
    samples = arguments.get("samples", "")
    columns = arguments.pop("columns", None)
    if columns and not samples:
        raise UserError("--columns names columns of --samples FILE")
    judge_again = arguments.get("rejudge", False)
    if judge_again and not samples:
        raise UserError("--rejudge needs --samples FILE; new responses are judged anyway")
    named = parse_columns(columns) if columns else None
    if samples:
        check_options_of_samples(arguments, judge_again=judge_again)
        check_marker(arguments, named, judge_again=judge_again)
    config = configuration(arguments)
    if not samples:
        check_options_of_source(arguments, config)
        check_scores_are_judged(arguments, config)
    with _progress() as progress:
        evaluation = run_evaluation(
            config,
            samples=samples,
            judge_again=judge_again,
            fresh=arguments.get("fresh", False),
            progress=progress,
            columns=named,
        )
    if not evaluation:  # on a rank other than the first
        return 0
    if args.json:
        print(json.dumps(evaluation, indent=1, allow_nan=False))
        return 0
    print_evaluation(evaluation)
    print(printable(f"wrote {args.out}"))
    return 0


def configuration(arguments: Mapping[str, Any]) -> EvaluateConfig:
    """Return the configuration for the parsed arguments. Raises :class:`UserError`."""
    from megatron_dcpo.config.evaluation import load_evaluation
    from megatron_dcpo.evaluation.evaluation_run import evaluation_of_samples

    defaults = {}
    samples = arguments.get("samples")
    if samples:
        before = evaluation_of_samples(samples)
        if "marker" in before:
            defaults["judging"] = {"marker": before["marker"]}
    return load_evaluation(
        overrides_of(arguments),
        file=arguments.get("config"),
        as_trained=arguments.get("as_trained"),
        defaults=defaults,
        evaluates_model=not samples,
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a bar with the time left on a terminal, and ten log lines elsewhere. With several ranks
    it is the first rank's share.
    """
    if signals.launched_rank() != 0:
        yield lambda name, done, total: None
        return
    if not sys.stderr.isatty():
        tenths: dict[str, int] = {}

        def log(name: str, done: int, total: int) -> None:
            tenth = 10 * done // max(total, 1)
            if tenths.get(name) != tenth:
                tenths[name] = tenth
                logger.info("%s: %d of %d samples", name, done, total)

        yield log
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

    description, bar = Progress.get_default_columns()[:2]
    counts = MofNCompleteColumn()
    rest = TimeRemainingColumn()
    with Progress(description, bar, counts, rest, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield show


def _marker(text: str) -> str:
    if not text.strip() or "\n" in text:
        raise argparse.ArgumentTypeError("must be one line and not blank")
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
