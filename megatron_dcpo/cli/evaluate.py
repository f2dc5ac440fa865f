"""``dcpo evaluate``: accuracy and calibration of a model on benchmarks, or of responses sampled
before.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, add_judging_arguments, positive_int, program_limits
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.text import parse_json, printable

if TYPE_CHECKING:
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


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help=VERBS["evaluate"],
        description="Sample a model or a server on benchmarks, judge the responses, and write "
        "evaluation.json, "
        "samples.jsonl, diagrams and report.html. With --endpoint every finished sample is on "
        "disk at once, and the "
        "same command continues an interrupted evaluation. With --samples the responses of an "
        "earlier evaluation are "
        "scored again, no model. On several GPUs: dcpo launch N -- evaluate --model DIR ...",
        argument_default=argparse.SUPPRESS,  # the defaults are those of EvaluationConfig
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint directory")
    source.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible server, for instance http://host:8000/v1",
    )
    source.add_argument("--samples", metavar="FILE", help="score this samples.jsonl again")
    parser.add_argument(
        "--as-trained",
        metavar="CONFIG",
        help="prompts as that run had them: its template, marker, thinking, longest response, and "
        "with --endpoint its "
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
    parser.add_argument("--repeats", type=positive_int, help="responses per problem (default 4)")
    parser.add_argument(
        "--confidence",
        help=f"kinds, comma separated (default verbal,token,consistency): {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--features", action="store_true", help="keep what dcpo calibrate --method confclass reads"
    )
    parser.add_argument(
        "--calibrator",
        "--posthoc",
        dest="posthoc",
        metavar="FILE",
        help="score the post-hoc confidence that dcpo calibrate fitted as well",
    )
    parser.add_argument(
        "--marker",
        type=_marker,
        help="what opens the confidence line (default <conf>; of --samples: as before)",
    )
    parser.add_argument(
        "--template",
        help="prompt template: paper, abstain, grpo, chat, raw, or my_prompt.py:render (default "
        "paper)",
    )
    parser.add_argument(
        "--thinking",
        choices=["off", "on", "auto"],
        help="of models that think: off, on, or as the chat template has it (default off)",
    )
    parser.add_argument(
        "--limit", type=positive_int, help="only the first problems of every benchmark"
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="where benchmark files are (default: $DCPO_DATA, else data/)",
    )
    parser.add_argument(
        "--corrections", action="store_true", help="repair documented defects of benchmark data"
    )
    parser.add_argument(
        "--untested",
        action="store_true",
        help="keep programming problems whose tests assert nothing (3 of MBPP+)",
    )
    parser.add_argument(
        "--rejudge", action="store_true", help="with --samples: judge the responses anew as well"
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


def _add_sampling_arguments(sampling: Any) -> None:
    sampling.add_argument("--temperature", type=float, help="default 0.7")
    sampling.add_argument("--top-p", type=float, help="default 0.8")
    sampling.add_argument("--top-k", type=int, help="0: off (default 20)")
    sampling.add_argument(
        "--max-tokens", type=positive_int, help="longest response in tokens (default 3000)"
    )
    sampling.add_argument("--seed", type=int, help="default 0")
    sampling.add_argument(
        "--batch-size",
        type=positive_int,
        help="responses sampled at once (default 64; by vLLM on a GPU 512)",
    )
    sampling.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        help="of --model (default auto: bfloat16 on a GPU, else float32)",
    )
    sampling.add_argument(
        "--engine",
        choices=["auto", "vllm", "transformers"],
        help="what samples --model; auto (default): vLLM on a GPU where it is installed and can "
        "run the model",
    )


def _add_server_arguments(server: Any) -> None:
    server.add_argument(
        "--model-name", help="model to ask the server for (default: the only one it offers)"
    )
    server.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="render the prompts here, as training does, and send token ids (completions)",
    )
    server.add_argument(
        "--api",
        choices=["chat", "completions"],
        help="default: completions for --template raw, else chat",
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
        "--extra-body", type=_json_object, metavar="JSON", help="added to every request"
    )


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.cli.report import print_table
    from megatron_dcpo.evaluation.evaluate import scored_kinds
    from megatron_dcpo.evaluation.run import EvaluationConfig, run_evaluation
    from megatron_dcpo.evaluation.scoring import headline

    signals.exit_with_launcher()
    names = {option.name for option in fields(EvaluationConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if hasattr(args, "as_trained"):
        given = as_trained(args.as_trained, server="endpoint" in given) | given
    with _progress() as progress:
        evaluation = run_evaluation(
            EvaluationConfig(limits=program_limits(args), **given), progress
        )
    if not evaluation:  # of another rank than the first
        return 0
    if args.json:
        print(json.dumps(evaluation, indent=1, allow_nan=False))
        return 0
    rows = {
        f"{name} {kind}": headline(evaluation, kind, name)
        for name, scores in evaluation["benchmarks"].items()
        for kind in scored_kinds(scores)
    }
    if len(evaluation["benchmarks"]) > 1:
        rows |= {
            f"overall {kind}": headline(evaluation, kind)
            for kind in scored_kinds(evaluation["overall"])
        }
    print_table(rows, "benchmark")
    for name, scores in evaluation["benchmarks"].items():
        if rates := scores.get("abstention"):
            shown = (f"{key} {value:.3f}" for key, value in rates.items() if value is not None)
            print(printable(f"{name} abstention: {', '.join(shown)}"))
    print(printable(f"wrote {args.out}"))
    return 0


def as_trained(path: str, server: bool) -> dict[str, Any]:
    """Return the options that make the prompts of an evaluation those of the run with the
    configuration at ``path``.
    """
    from megatron_dcpo.config import load_config

    config = load_config(path)
    judging = config.judging
    options: dict[str, Any] = {"template": config.data.template, "marker": judging.marker}
    options |= {"thinking": config.data.thinking}
    options |= {"verifier": judging.verifier, "threshold": judging.threshold}
    return (
        options
        | {"max_tokens": config.rollout.max_response_length}
        | ({"tokenizer": config.model.path} if server else {})
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a bar with time left on a terminal, ten log lines elsewhere; of several ranks the first
    one's share.
    """
    if int(os.environ.get("RANK", "0")):
        yield lambda name, done, total: None
        return
    if not sys.stderr.isatty():
        tenths: dict[str, int] = {}

        def log(name: str, done: int, total: int) -> None:
            if tenths.get(name) != (tenth := 10 * done // max(total, 1)):
                tenths[name] = tenth
                logger.info("%s: %d of %d samples", name, done, total)

        yield log
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns: Sequence[Any] = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
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
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
