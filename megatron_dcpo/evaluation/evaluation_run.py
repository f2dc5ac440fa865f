"""Run a whole evaluation from one configuration: obtain the responses, judge them, score them."""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dcpo.config import JudgingConfig, SourceConfig
from megatron_dcpo.config.evaluation_sections import EvaluateConfig
from megatron_dcpo.config.field_types import VerifierChoice, as_written
from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.data.benchmarks import BENCHMARKS, parse_specs, path_in
from megatron_dcpo.data.problem_kinds import check_kinds
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import (
    AnswerJudge,
    Progress,
    evaluate_benchmark,
    rejudge,
)
from megatron_dcpo.evaluation.fit_record import fitted_on_of
from megatron_dcpo.evaluation.foreign import has_verdicts_of_ours, read_any
from megatron_dcpo.evaluation.model_files import files_of
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc
from megatron_dcpo.evaluation.problems import (
    Problems,
    judge_of,
    judges_programs,
    load_problems,
)
from megatron_dcpo.evaluation.program_tests import read_tests, write_tests
from megatron_dcpo.evaluation.responders import Responder, ask_server, model_name, top_logprobs
from megatron_dcpo.evaluation.results import write_evaluation
from megatron_dcpo.evaluation.run_description import SAMPLING
from megatron_dcpo.evaluation.samples import (
    DATE,
    FILE,
    SETTINGS,
    Sample,
    SampleLog,
    check_samples,
    date_of,
    settings_next_to,
)
from megatron_dcpo.evaluation.scoring import parse_kinds, score_samples
from megatron_dcpo.judging.source_verifiers import (
    GYM_VERIFIER,
    find_source,
    verifier_of,
)
from megatron_dcpo.judging.verdicts import check_unjudged
from megatron_dcpo.judging.verifier_kind import PackedTests
from megatron_dcpo.judging.verifiers import (
    digest_of,
    equivalence,
    reads_rows,
    verifier_for,
    verifiers,
)
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.brought import REASONING_GYM
from megatron_dcpo.runtime.plugins import source_digest
from megatron_dcpo.runtime.run_records import today
from megatron_dcpo.runtime.signals import launched_rank
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.types import CONFIDENCE_TAG

logger = logging.getLogger(__name__)

_LONGEST_MINUTES = 24 * 60  # for which a rank waits for the slowest one
TESTS_FILE = "tests.jsonl.gz"  # next to samples.jsonl: needed to judge programs again
# judging options that settings.json names only if they differ from the defaults
_JUDGED_BY = ("test_seconds", "program_seconds", "memory_mb", "graded")


def run_evaluation(
    config: EvaluateConfig,
    *,
    samples: str = "",
    judge_again: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Sample, judge and score, and write everything to ``config.run_dir``; return the content of
    ``evaluation.json``.

    With ``samples``, a file of an earlier evaluation or a log of somebody else's whose ``columns``
    are named (``foreign.py``), nothing is sampled, and the responses are
    judged again only with ``judge_again``. ``fresh`` drops the samples of an earlier evaluation in
    the directory; otherwise it is continued.

    Under ``dcpo launch N`` every rank is an engine that samples and judges its share of the prompts
    of the model; the first one scores and writes, and the others return nothing. Raises
    :class:`UserError` for bad input, as early as possible.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not config.model.path:
        raise UserError(
            f"{ranks} processes were started, but only --model is sampled by several; leave out "
            "dcpo launch"
        )
    if not (samples or config.model.path or config.endpoint.url):
        raise UserError("one of --model, --endpoint and --samples is required")
    options = config.evaluation
    kinds = parse_kinds(options.confidence)
    predictor = Posthoc.load(options.calibrator) if options.calibrator else None
    if predictor is not None and predictor.method == "confclass":
        options = replace(options, features=True)
        config = replace(config, evaluation=options)
    if samples:
        judged, responses = _old_samples(
            config, samples, judge_again=judge_again, fresh=fresh, columns=columns
        )
        model = str(evaluation_of_samples(samples).get("model", ""))
    else:
        config = _with_models_here(config, fresh=fresh)
        judged, responses, model = _new_samples(config, ranks, fresh=fresh, progress=progress)
        if launched_rank() > 0:
            return {}
    unjudged = responses - len(judged)
    is_replaced = Path(samples).resolve().parent == Path(config.run_dir).resolve()
    if not judged or (unjudged and samples and is_replaced):  # or else responses were lost
        check_unjudged(unjudged, responses, 0.0, "nothing is written")
    source = samples or str(Path(config.run_dir, FILE))
    if predictor is not None:
        _warn_of_other_answers(predictor, options.calibrator, source, judged)
        judged = predictor.apply(judged)
        kinds = tuple(dict.fromkeys((*kinds, "posthoc")))
    evaluation = score_samples(
        judged,
        kinds,
        model,
        resamples=options.resamples,
        seed=options.seed,
        kinds_by=options.kinds,
    )
    keeps_verdicts = not judge_again and has_verdicts_of_ours(samples, columns)
    marker = _marker_before(samples) if keeps_verdicts else config.judging.marker
    if marker != CONFIDENCE_TAG:
        evaluation["marker"] = marker
    evaluation["sampled"] = _sampling_of(source)
    if unjudged:
        evaluation["unjudged"] = unjudged
        logger.warning(
            "%d of %d responses are unjudged and in no number; the same command tries them again",
            unjudged,
            responses,
        )
    write_evaluation(config.run_dir, evaluation, judged)
    check_unjudged(
        unjudged, responses, config.judging.max_error_rate, f"written to {config.run_dir}"
    )
    return evaluation


def _with_models_here(config: EvaluateConfig, *, fresh: bool) -> EvaluateConfig:
    """Return the configuration with the directories of its model, and of the tokenizer for a
    server's. An evaluation that is continued takes the commit that it began with.
    """
    before = None if fresh else settings_next_to(Path(config.run_dir, FILE))
    commit = ""
    if before and before.get("model") == model_name(config):
        commit = str(before.get("commit") or "")
    path = hub.model_directory(config.model.path, commit=commit)
    tokenizer = hub.model_directory(config.endpoint.tokenizer, weights=False)
    return replace(
        config,
        model=replace(config.model, path=path),
        endpoint=replace(config.endpoint, tokenizer=tokenizer),
    )


def _warn_of_other_answers(
    predictor: Posthoc, path: str, source: str, judged: Sequence[Sample]
) -> None:
    """Say how the answers differ from those that a predictor was fitted on, as far as the settings
    next to both are known.
    """
    fitted = predictor.record.fitted_on if predictor.record else None
    asked = fitted_on_of([source], judged)
    if fitted is None or asked is None:
        return
    differences = fitted.differences(asked)
    if differences:
        logger.warning(
            "%s was fitted on other answers than these (%s): its confidence need not be calibrated "
            "here; fit one on such answers",
            path,
            "; ".join(differences),
        )


def evaluation_of_samples(samples: str) -> dict[str, Any]:
    """Return the ``evaluation.json`` next to a file of samples, {} if there is none."""
    path = Path(samples).with_name("evaluation.json")
    return read_json_object(path) if path.exists() else {}


def _marker_before(samples: str) -> str:
    """Return the tag that the confidences in a file of samples were read behind."""
    return str(evaluation_of_samples(samples).get("marker", CONFIDENCE_TAG))


def _sampling_of(samples: str) -> dict[str, Any]:
    """Return how a file of samples was sampled, from the settings next to it; {} if unknown."""
    settings = settings_next_to(samples) or {}
    keys = (*SAMPLING, "template", "thinking")
    return {key: settings[key] for key in keys if key in settings}


# --------------------------------------------------------------------------------- earlier samples


def _old_samples(
    config: EvaluateConfig,
    path: str,
    *,
    judge_again: bool,
    fresh: bool,
    columns: Mapping[str, str] | None,
) -> tuple[list[Sample], int]:
    """Read the responses of an earlier evaluation, or of somebody else's log, and judge them again
    if ``judge_again``; return the samples, and how many responses there were.
    """
    samples = read_any(path, columns, config.judging.marker)
    if not samples:
        raise UserError(f"{path}: the file has no samples")
    directory = Path(config.run_dir)
    holds_samples = (directory / SETTINGS).is_file() and not fresh
    if holds_samples and directory.resolve() != Path(path).resolve().parent:
        raise UserError(
            f"--out {directory} holds the samples of another evaluation; name another one, or "
            "--fresh"
        )
    keys = {sample.prompt.ground_truth for sample in samples if sample.is_code}
    tests_file = Path(path).with_name(TESTS_FILE)
    tests: PackedTests = {}
    if keys and (judge_again or tests_file.exists()):
        tests = read_tests(tests_file, keys)
        directory.mkdir(parents=True, exist_ok=True)
        write_tests(tests, directory / TESTS_FILE)
    judged = _judge_again(samples, tests, config) if judge_again else samples
    return judged, len(samples)


def _judge_again(
    samples: Sequence[Sample], tests: PackedTests, config: EvaluateConfig
) -> list[Sample]:
    """Judge all samples again, each by its verifier; return them in the order given, without those
    that could not be judged.
    """
    find = verifiers(config.judging, tests)
    by_verifier: dict[VerifierChoice, list[int]] = {}
    for index, sample in enumerate(samples):
        by_verifier.setdefault(_verifier_of_sample(sample, config), []).append(index)
    judged: dict[int, Sample] = {}
    for verifier, indices in by_verifier.items():
        judged_by = AnswerJudge(
            judge=judge_of(config.judging, find, verifier),
            equivalent=equivalence(verifier),
            digest=digest_of(verifier, config.judging),
        )
        again = {
            sample.name: sample for sample in rejudge([samples[i] for i in indices], judged_by)
        }
        for index in indices:
            if samples[index].name in again:
                judged[index] = again[samples[index].name]
    return [judged[index] for index in sorted(judged)]


def _verifier_of_sample(sample: Sample, config: EvaluateConfig) -> VerifierChoice:
    prompt = sample.prompt
    source = find_source(prompt.task, "", config.data.sources)
    named = config.judging.verifier
    if source is not None:
        named = verifier_of(source, config.judging)
    if sample.is_code:
        return named if judges_programs(named) else "code"
    row = prompt.row or {}
    if "reasoning_gym" in row:
        return GYM_VERIFIER
    if judges_programs(named):
        named = "math"
    return verifier_for(prompt.form, named, prompt.task in BENCHMARKS)


# -------------------------------------------------------------------------------------- new samples


def _new_samples(
    config: EvaluateConfig, ranks: int, *, fresh: bool, progress: Progress | None
) -> tuple[list[Sample], int, str]:
    """Sample the model or the server on every benchmark and judge the responses; return the
    samples, how many responses there were, and the name of the model. Each of several ``ranks``
    samples its share and gets the samples of all ranks.
    """
    loaded = _load_problems(config)
    date = None if fresh else date_of(config.run_dir)
    date = date or today()
    if ranks > 1:
        from megatron_dcpo.runtime import distributed

        distributed.initialize(timeout_minutes=_LONGEST_MINUTES)
    check = partial(_check_directory, config, loaded)
    if config.endpoint.url:
        responder = ask_server(config, date)
        settings = settings_of(config, responder.model, date)
        if not fresh:
            check(settings)
    else:
        from megatron_dcpo.evaluation.local_model import element_type, sample_model

        settings = settings_of(config, model_name(config), date)
        settings |= files_of(config.model.path, config.model.adapter_path)
        settings["params_dtype"] = element_type(config)
        if launched_rank() == 0 and not fresh:  # before the slow loading of the model
            check(settings)
        responder = sample_model(config, loaded, date)
    share = slice(launched_rank(), None, ranks)
    prompts = [responder.render(problems) for problems in loaded]
    check_kinds([prompt for rendered in prompts for prompt in rendered], config.evaluation.kinds)
    log = SampleLog(config.run_dir, settings, fresh) if launched_rank() == 0 else None
    with log or nullcontext():
        if log is not None:
            log.match([prompt for rendered in prompts for prompt in rendered])
        tests: dict[str, bytes] = {}
        for problems in loaded:
            tests.update(problems.tests)
        if tests and launched_rank() == 0:
            write_tests(tests, Path(config.run_dir) / TESTS_FILE)
        samples: list[Sample] = []
        for problems, rendered in zip(loaded, prompts, strict=True):
            samples += evaluate_benchmark(
                rendered[share],
                responder.respond,
                repeats=config.evaluation.samples,
                judged_by=_judged_by(problems, responder),
                keep_features=config.evaluation.features,
                log=log,
                progress=progress,
            )
    if ranks > 1:
        samples = _gathered(samples, loaded)
        from megatron_dcpo.runtime import distributed

        distributed.destroy()
    _check_same_verifiers(config, loaded)
    responses = sum(map(len, prompts)) * config.evaluation.samples
    return samples, responses, responder.model


def _check_same_verifiers(config: EvaluateConfig, loaded: Sequence[Problems]) -> None:
    """Raise :class:`UserError` if a user's verifier was edited while it judged."""
    for problems in loaded:
        if digest_of(problems.verifier, config.judging) != problems.digest:
            raise UserError(
                f"judging.verifier={as_written(problems.verifier)}: the file was changed while "
                f"responses were judged; the same command judges those in {config.run_dir} again"
            )


def _load_problems(config: EvaluateConfig) -> list[Problems]:
    """Load the benchmarks. This comes before the model is loaded, because it finds everything that
    can be wrong with the data or with running programs on this machine.
    """
    options = config.evaluation
    if not options.benchmarks:
        raise UserError(
            "--benchmarks is missing; name at least one, for instance --benchmarks math500"
        )
    find_template(config.data.template)
    _check_verifier_is_used(config)
    return load_problems(
        options.benchmark_list,
        config.judging,
        sources=config.data.sources,
        reading=RowOptions(
            columns=config.data.columns, row=config.data.row, unread=config.data.unread
        ),
    )


def _check_verifier_is_used(config: EvaluateConfig) -> None:
    """Raise :class:`UserError` for a verifier that is named where every benchmark is of Reasoning
    Gym, which judges by itself.
    """
    named = config.judging.verifier
    if named == JudgingConfig.verifier or config.data.sources:
        return
    specs = parse_specs(config.evaluation.benchmark_list)
    if all(path_in(spec).startswith(REASONING_GYM) for spec in specs):
        raise UserError(
            "judging.verifier would judge nothing: the benchmarks are of Reasoning Gym, which "
            "brings its scores; remove it"
        )


def _judged_by(problems: Problems, responder: Responder) -> AnswerJudge:
    judge = partial(problems.judge, tokens=responder.tokens)
    return AnswerJudge(judge, problems.equivalent, problems.digest)


def _check_directory(
    config: EvaluateConfig, loaded: Sequence[Problems], settings: dict[str, Any]
) -> None:
    """Raise :class:`UserError` if the directory has samples of another evaluation."""
    limit = config.evaluation.limit or None
    wanted: set[tuple[str, str]] = set()
    for problems in loaded:
        for record in problems.benchmark.records[:limit]:
            wanted.add((problems.benchmark.name, record.prompt_id))
    check_samples(Path(config.run_dir), settings, wanted, config.evaluation.samples)


def _gathered(samples: list[Sample], loaded: Sequence[Problems]) -> list[Sample]:
    """Return the samples of all ranks in the order of a single process."""
    position: dict[tuple[str, str], int] = {}
    for problems in loaded:
        for record in problems.benchmark.records:
            position[problems.benchmark.name, record.prompt_id] = len(position)
    gathered: list[Sample] = []
    from megatron_dcpo.runtime import distributed

    for part in distributed.all_gather_objects(samples):
        gathered += part
    return sorted(
        gathered, key=lambda sample: (position[sample.problem_key], sample.response.sample_index)
    )


def settings_of(config: EvaluateConfig, model: str, date: datetime.date) -> dict[str, Any]:
    """Return the content of ``settings.json`` for samples of ``model``; an evaluation is continued
    only with the same settings, and with the ``date`` that it began with.

    The address of a server, its load and the number of repeats may change between two runs. Options
    that only some evaluations use are left out of the settings of the others, whose directories
    stay usable when such an option is added.
    """
    options = config.evaluation
    settings: dict[str, Any] = {
        "template": config.data.template,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "max_tokens": config.max_tokens,
        "seed": options.seed,
        "extra_body": config.endpoint.extra_body,
        "top_logprobs": top_logprobs(config),
        "model": model,
        DATE: date.isoformat(),
    }
    judging = config.judging
    if judging.marker != CONFIDENCE_TAG:
        settings["marker"] = judging.marker
    if config.data.thinking != "off":
        settings["thinking"] = config.data.thinking
    if config.rollout.runs_agents:
        settings |= _agent_settings(config)
    if reads_rows(judging.verifier):
        settings["verifier"] = as_written(judging.verifier)
        settings["threshold"] = judging.threshold
    defaults = JudgingConfig()
    for name in _JUDGED_BY:
        if getattr(judging, name) != getattr(defaults, name):
            settings[name] = getattr(judging, name)
    if config.data.sources:
        settings["sources"] = [_source_settings(source) for source in config.data.sources]
    if config.endpoint.tokenizer:
        settings["tokenizer"] = hub.exact_name(config.endpoint.tokenizer)
    if config.endpoint.api != "auto":
        settings["api"] = config.endpoint.api
    return settings


def _agent_settings(config: EvaluateConfig) -> dict[str, Any]:
    """Return what decides how agents make the responses. Of a program only the command is known."""
    rollout = config.rollout
    settings: dict[str, Any] = {
        "agent": rollout.agent or rollout.command,
        "agent_calls": rollout.agent_calls,
        "asks_confidence": rollout.asks_confidence,
    }
    if rollout.agent_python:
        settings["agent_python"] = rollout.agent_python
    if rollout.agent:
        settings["agent_code"] = _code_of(rollout)
    return settings


def _code_of(rollout: AgentsConfig) -> str:
    """Return a digest of an agent's source: in another Python, where it is not imported here, of
    its file alone.
    """
    if not rollout.agent_python:
        return source_digest(rollout.agent, "rollout.agent")
    file = Path(rollout.agent.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def _source_settings(source: SourceConfig) -> dict[str, Any]:
    """Return the options of a source that decide what is sampled and how it is judged."""
    return {
        "path": source.path,
        "name": source.name,
        "verifier": source.verifier and as_written(source.verifier),
        "template": source.template,
    }
