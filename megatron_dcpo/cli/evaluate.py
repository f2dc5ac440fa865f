"""``dcpo evaluate``: accuracy and calibration of a model on benchmarks, or of earlier responses.

Every flag but those of the command itself (``COMMAND``) is a shorthand for an option, which may be
written as an override as well: ``--repeats 8`` is ``evaluation.samples=8``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, add_judging_arguments, add_kinds_argument, positive_int
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.text import parse_json, printable
from megatron_dcpo.types import BROUGHT

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
# the option that each flag sets, by the name of the flag in the parsed arguments
SHORTHANDS: Mapping[str, str] = {
    "model": "model.path",
    "adapter": "model.adapter_path",
    "dtype": "model.params_dtype",
    "endpoint": "endpoint.url",
    "model_name": "endpoint.model",
    "tokenizer": "endpoint.tokenizer",
    "api": "endpoint.api",
    "api_key_env": "endpoint.api_key_env",
    "concurrency": "endpoint.concurrency",
    "timeout": "endpoint.timeout",
    "attempts": "endpoint.attempts",
    "extra_body": "endpoint.extra_body",
    "out": "run_dir",
    "benchmarks": "evaluation.benchmarks",
    "repeats": "evaluation.samples",
    "confidence": "evaluation.confidence",
    "features": "evaluation.features",
    "keep": "evaluation.keep",
    "calibrator": "evaluation.calibrator",
    "kinds": "evaluation.kinds",
    "limit": "evaluation.limit",
    "data_dir": "evaluation.data_dir",
    "corrections": "evaluation.corrections",
    "temperature": "evaluation.temperature",
    "top_p": "evaluation.top_p",
    "top_k": "evaluation.top_k",
    "max_tokens": "evaluation.max_tokens",
    "seed": "evaluation.seed",
    "resamples": "evaluation.resamples",
    "template": "data.template",
    "thinking": "data.thinking",
    "untested": "data.untested",
    "batch_size": "rollout.max_num_seqs",
    "engine": "rollout.engine",
    "agent": "rollout.agent",
    "command": "rollout.command",
    "marker": "judging.marker",
    "verifier": "judging.verifier",
    "threshold": "judging.threshold",
    "sandbox": "judging.sandbox",
    "test_seconds": "judging.test_seconds",
    "program_seconds": "judging.program_seconds",
    "memory_mb": "judging.memory_mb",
}
# the options that --samples reads, and those that it reads with --rejudge
_OF_SAMPLES = (
    "run_dir",
    "judging.marker",
    "evaluation.confidence",
    "evaluation.calibrator",
    "evaluation.kinds",
    "evaluation.resamples",
    "evaluation.seed",
)
_OF_JUDGING = ("judging.", "data.sources")
_OF_SERVER = ("endpoint.",)
_OF_MODEL = ("model.", "rollout.")
_OF_BOTH = ("rollout.max_response_length",)
_DTYPES = {"auto": "auto", "float32": "fp32", "bfloat16": "bf16"}  # values of --dtype


_MOST_KINDS_SHOWN = 20
_LONGEST_ANSWER = 30


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
        "group, task, kind",
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
    parser.add_argument("--repeats", type=positive_int, help="responses per problem (default 4)")
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
        "--keep",
        choices=["states"],
        help="with --model: keep the model's state before the number of each confidence, which "
        "dcpo calibrate --features states and stack read",
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
        "--data-dir",
        metavar="DIR",
        help="directory of the benchmark files (default: $DCPO_DATA, or data/)",
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
    sampling.add_argument(
        "--temperature", type=float, help="default 0.7; 0: greedy, with --repeats 1"
    )
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
    from megatron_dcpo.evaluation.foreign import parse_columns
    from megatron_dcpo.evaluation.run import run_evaluation

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
        _check_options_of_samples(arguments, judge_again=judge_again)
        _check_marker(arguments, named, judge_again=judge_again)
    config = configuration(arguments)
    if not samples:
        _check_options_of_source(arguments, config)
        _check_scores_are_judged(arguments, config)
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
    _print_evaluation(evaluation)
    print(printable(f"wrote {args.out}"))
    return 0


def _check_options_of_samples(arguments: Mapping[str, Any], *, judge_again: bool) -> None:
    """Raise :class:`UserError` for an option that changes nothing about answers that there are. A
    configuration file may have it, since it describes other evaluations as well.
    """
    if arguments.get("as_trained") and not judge_again:
        raise UserError("--as-trained judges as in that run; add --rejudge, or remove it")
    for option in overrides_of(arguments):
        if option in _OF_SAMPLES:
            continue
        written = _as_written(option, arguments)
        if not option.startswith(_OF_JUDGING):
            raise UserError(
                f"{written} does not go with --samples, which scores the answers that there are; "
                "remove it"
            )
        if not judge_again:
            raise UserError(f"{written} is an option of judging; add --rejudge, or remove it")


def _check_marker(
    arguments: Mapping[str, Any], columns: Mapping[str, str] | None, *, judge_again: bool
) -> None:
    """Raise :class:`UserError` for a tag where no confidence is read: in samples of ours it has
    been, behind the tag of their evaluation.
    """
    from megatron_dcpo.evaluation.foreign import has_verdicts_of_ours

    if judge_again or "judging.marker" not in overrides_of(arguments):
        return
    samples = arguments["samples"]
    if has_verdicts_of_ours(samples, columns):
        written = _as_written("judging.marker", arguments)
        raise UserError(
            f"{written}: the confidences in {samples} have been read already; add --rejudge, or "
            "remove it"
        )


def _check_options_of_source(arguments: Mapping[str, Any], config: EvaluateConfig) -> None:
    """Raise :class:`UserError` for an option of a server where a model in this process is sampled,
    or the other way round. A configuration file may have both.
    """
    unread: tuple[str, ...] = _OF_SERVER
    source = "a model in this process"
    if config.endpoint.url:
        unread, source = _OF_MODEL, "a server"
    for option in overrides_of(arguments):
        if option.startswith(unread) and option not in _OF_BOTH:
            written = _as_written(option, arguments)
            raise UserError(f"{written} changes nothing about the answers of {source}; remove it")


def _check_scores_are_judged(arguments: Mapping[str, Any], config: EvaluateConfig) -> None:
    """Raise :class:`UserError` for an option of scores where every verdict is right or wrong. A run
    whose options are taken (``--as-trained``) may have had other verifiers.
    """
    from megatron_dcpo.config.field_types import gives_scores

    verifier = config.judging.verifier
    benchmarks = config.evaluation.benchmark_list
    brought = any(name in benchmarks for name in BROUGHT)
    if gives_scores(verifier) or brought or config.rollout.runs_agents:
        return
    for option in overrides_of(arguments):
        if option in ("judging.threshold", "judging.graded") and not config.data.sources:
            raise UserError(
                f"{_as_written(option, arguments)} is for f1, a verifier of yours, or several with "
                f"weights, and {verifier} says right or wrong; remove it"
            )


def _as_written(option: str, arguments: Mapping[str, Any]) -> str:
    """Return an option as it stands on the command line: the flag for it, or its dotted name."""
    for flag, name in SHORTHANDS.items():
        if name == option and flag in arguments:
            return f"--{flag.replace('_', '-')}"
    return option


def configuration(arguments: Mapping[str, Any]) -> EvaluateConfig:
    """Return the configuration for the parsed arguments. Raises :class:`UserError`."""
    from megatron_dcpo.config.evaluation import load_evaluation
    from megatron_dcpo.evaluation.run import evaluation_of_samples

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


def overrides_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that flags and overrides set, by dotted name.

    Raises :class:`UserError`, which names both, if a flag and an override differ.
    """
    from megatron_dcpo.config import parse_overrides

    options = parse_overrides(arguments.get("overrides", ()))
    for flag, option in SHORTHANDS.items():
        if flag not in arguments:
            continue
        value = arguments[flag]
        if flag == "dtype":
            value = _DTYPES[value]
        if option in options and not _is_same(options[option], value):
            written = f"--{flag.replace('_', '-')}"
            raise UserError(
                f"{written} {arguments[flag]} and {option}={options[option]} set the same option; "
                "remove one of them"
            )
        options[option] = value
    return options


def _is_same(one: object, other: object) -> bool:
    """Return whether two values are the same. YAML reads the words on and off as true and false."""
    words = {True: "on", False: "off"}
    if isinstance(one, bool) and isinstance(other, str):
        return words[one] == other
    return one == other


def _print_evaluation(evaluation: Mapping[str, Any]) -> None:
    """Print the table of results for people."""
    from megatron_dcpo.cli.report import print_table
    from megatron_dcpo.evaluation.kinds import no_kinds_line
    from megatron_dcpo.evaluation.scoring import LOOKUP, headline, scored_kinds

    scored = dict(evaluation["benchmarks"])
    if len(scored) > 1:
        scored["overall"] = evaluation["overall"]
    rows = {}
    for name, scores in scored.items():
        benchmark = name if name in evaluation["benchmarks"] else None
        for kind in (*scored_kinds(scores), LOOKUP):
            rows[f"{name} {kind}"] = headline(evaluation, kind, benchmark)
    print_table(rows, "benchmark")
    if not evaluation["kinds"]["by"]:
        print(printable(no_kinds_line(evaluation["kinds"]["possible"])))
    _print_passes(scored)
    _print_guesses(scored)
    for name, scores in evaluation["benchmarks"].items():
        _print_refusals(name, scores)
        _print_reading(name, scores)
        rates = scores.get("abstention")
        if rates:
            shown = []
            for key, value in rates.items():
                if value is not None:
                    shown.append(f"{key} {value:.3f}")
            print(printable(f"{name} abstention: {', '.join(shown)}"))


def _print_passes(scored: Mapping[str, Mapping[str, Any]]) -> None:
    """Print pass@k of each benchmark, in percent, with its 95 % interval."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    sizes: dict[str, None] = {}
    for scores in scored.values():
        sizes.update(dict.fromkeys(scores.get("pass_at_k", {})))
    if not sizes:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    columns = sorted(sizes, key=int)
    for k in columns:
        table.add_column(f"pass@{k}", justify="right", no_wrap=True)
    for name, scores in scored.items():
        ends_of = (scores.get("ci95") or {}).get("pass_at_k", {})
        cells = []
        for k in columns:
            value = scores.get("pass_at_k", {}).get(k)
            cells.append(_percent(value, ends_of.get(k)))
        table.add_row(Text(printable(name)), *cells)
    console = Console()
    if not console.is_terminal:  # a file has no window to fit
        console = Console(width=140)
    console.print(table, markup=False)


def _print_guesses(scored: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the accuracy of each benchmark and of each of its kinds, next to the accuracy of always
    giving its most frequent answer.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for column in ("problems", "accuracy", "prompt-blind"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("by always answering", no_wrap=True)
    for name, scores in scored.items():
        parts = {name: scores}
        kinds = scores.get("by_kind", {})
        for kind, of_kind in list(kinds.items())[:_MOST_KINDS_SHOWN]:
            parts[f"  {kind}"] = of_kind
        for title, part in parts.items():
            blind = part.get("prompt_blind", {})
            table.add_row(
                Text(printable(title)),
                str(part.get("problems", "–")),
                _percent(part.get("accuracy"), None),
                _percent(blind.get("accuracy"), None),
                Text(printable(str(blind.get("answer", "")))[:_LONGEST_ANSWER]),
            )
        if len(kinds) > _MOST_KINDS_SHOWN:
            table.add_row(f"  {len(kinds) - _MOST_KINDS_SHOWN} more kinds")
    console = Console()
    if not console.is_terminal:  # a file has no window to fit
        console = Console(width=140)
    console.print(table, markup=False)


def _percent(value: float | None, ends: Sequence[float] | None) -> str:
    """Return ``50.0% (41.2 to 58.8)``, or a dash for a missing value."""
    if value is None:
        return "–"
    text = f"{100 * value:.1f}%"
    if ends:
        low, high = ends
        text += f" ({100 * low:.1f} to {100 * high:.1f})"
    return text


def _print_reading(name: str, scores: Mapping[str, Any]) -> None:
    """Say what a post-hoc confidence was read from."""
    by = scores.get("posthoc", {}).get("by")
    if by:
        print(printable(f"{name} posthoc: {'; '.join(by)}"))


def _print_refusals(name: str, scores: Mapping[str, Any]) -> None:
    if "refused_rate" not in scores:
        return
    share = f"{100 * scores['refused_rate']:.1f}%"
    said = f"{name}: the server refused {share} of the samples (refused_rate)"
    print(printable(f"{said}; they count as wrong"))


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
