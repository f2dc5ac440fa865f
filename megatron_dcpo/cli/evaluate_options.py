"""The options of ``dcpo evaluate``: what its flags set, and which change nothing here and are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.brought import REASONING_GYM

if TYPE_CHECKING:
    from megatron_dcpo.config.evaluation_sections import EvaluateConfig

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
    "calibrator": "evaluation.calibrator",
    "kinds": "evaluation.kinds",
    "limit": "evaluation.limit",
    "temperature": "evaluation.temperature",
    "top_p": "evaluation.top_p",
    "top_k": "evaluation.top_k",
    "max_tokens": "evaluation.max_tokens",
    "seed": "evaluation.seed",
    "resamples": "evaluation.resamples",
    "template": "data.template",
    "thinking": "data.thinking",
    "batch_size": "rollout.max_num_seqs",
    "engine": "rollout.engine",
    "agent": "rollout.agent",
    "agent_python": "rollout.agent_python",
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


def check_options_of_samples(arguments: Mapping[str, Any], *, judge_again: bool) -> None:
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


def check_marker(
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


def check_options_of_source(arguments: Mapping[str, Any], config: EvaluateConfig) -> None:
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


def check_scores_are_judged(arguments: Mapping[str, Any], config: EvaluateConfig) -> None:
    """Raise :class:`UserError` for an option of scores where every verdict is right or wrong. A run
    whose options are taken (``--as-trained``) may have had other verifiers.
    """
    from megatron_dcpo.config.field_types import gives_scores

    verifier = config.judging.verifier
    benchmarks = config.evaluation.benchmark_list
    brought = REASONING_GYM in benchmarks
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
