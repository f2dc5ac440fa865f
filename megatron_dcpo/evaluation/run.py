"""A whole evaluation from one configuration: where the responses come from, how they are judged,
what is scored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron_dcpo.config import JudgingConfig, ValidationConfig
from megatron_dcpo.data import BENCHMARKS, LoadedBenchmark, render_prompts
from megatron_dcpo.data.datasets import message_prompts
from megatron_dcpo.data.gym import VERIFIER
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.errors import UserError, validation_message
from megatron_dcpo.evaluation.evaluate import (
    Complete,
    Progress,
    complete_at_once,
    evaluate_benchmark,
    rejudge,
    write_evaluation,
)
from megatron_dcpo.evaluation.heldout import equivalence, judge_of, load_problems
from megatron_dcpo.evaluation.posthoc import TOP_LOGPROBS, Posthoc
from megatron_dcpo.evaluation.programs import is_code, read_tests, write_tests
from megatron_dcpo.evaluation.samples import (
    SETTINGS,
    Sample,
    SampleLog,
    check_samples,
    read_samples,
)
from megatron_dcpo.evaluation.scoring import parse_kinds, score_samples
from megatron_dcpo.judging.programs import PackedTests
from megatron_dcpo.judging.thinking import KNOWN, check_thinking, keep_thinking
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.judging.users import check_error_rate
from megatron_dcpo.judging.verifiers import reads_rows, verifier_for, verifiers
from megatron_dcpo.rollout import SamplingConfig, VllmOptions, choose_engine
from megatron_dcpo.rollout.openai_client import Endpoint, served_model
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.sandbox.local import CodeLimits
from megatron_dcpo.types import CONFIDENCE_TAG, Prompt

Render = Callable[[LoadedBenchmark], list[Prompt]]

_LONGEST_MINUTES = 24 * 60  # for which a rank waits for the slowest one
TESTS_FILE = "tests.jsonl.gz"  # beside samples.jsonl: what judging programs again needs


def _saved(default: Any) -> Any:
    """Declare an option that samples depend on: an evaluation is continued with the same value
    only. The address of a server, its load and the number of repeats may change between two runs.
    """
    return field(default=default, metadata={"saved": True})


@dataclass(frozen=True)
class EvaluationConfig:
    """What ``dcpo evaluate`` is told; the options of the command line have the same names.

    Exactly one of ``model`` (a Hugging Face directory), ``endpoint`` (the URL of an
    OpenAI-compatible server) and ``samples`` (a ``samples.jsonl``) is given. ``benchmarks`` and
    ``confidence`` are comma-separated names. ``marker`` None: the confidence tag of ``samples``,
    else ``<conf>``. ``timeout`` is in seconds, for one sample. ``tokenizer``: a directory whose
    tokenizer renders the prompts for ``endpoint``, as training does; their token ids are sent
    instead of messages. ``thinking``: as ``data.thinking``. ``dtype`` auto: bf16 on a GPU, else
    fp32. ``batch_size``: responses of ``model`` sampled at once; 0: 512 by vLLM on a GPU, else 64.
    """

    out: str | Path
    model: str | None = None
    endpoint: str | None = None
    tokenizer: str | None = None
    samples: str | None = None
    benchmarks: str = ""
    repeats: int = 4
    confidence: str = "verbal,token,consistency"
    features: bool = False
    posthoc: str | None = None
    marker: str | None = None
    verifier: str = JudgingConfig.verifier
    threshold: float = JudgingConfig.threshold
    template: str = _saved("paper")
    thinking: Literal["off", "on", "auto"] = "off"
    limit: int | None = None
    data_dir: str | None = None
    corrections: bool = _saved(False)
    untested: bool = _saved(False)
    rejudge: bool = False
    resamples: int = 1000
    # sampling: the paper's evaluation
    temperature: float = _saved(ValidationConfig.temperature)
    top_p: float = _saved(ValidationConfig.top_p)
    top_k: int = _saved(ValidationConfig.top_k)
    max_tokens: int = _saved(3000)
    seed: int = _saved(0)
    batch_size: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    # programs
    sandbox: str = "auto"
    limits: CodeLimits = field(default_factory=CodeLimits)
    # server
    model_name: str | None = None
    api: Literal["chat", "completions"] | None = None
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 32
    timeout: float = 600.0
    attempts: int = 8
    extra_body: Mapping[str, Any] = field(default_factory=dict, metadata={"saved": True})
    fresh: bool = False

    @property
    def top_logprobs(self) -> int:
        return (
            TOP_LOGPROBS if self.features or "token_entropy" in parse_kinds(self.confidence) else 0
        )

    @property
    def judging(self) -> JudgingConfig:
        """Return how responses are judged. Raises :class:`UserError`."""
        limits, own = (
            self.limits,
            {"marker": self.marker or CONFIDENCE_TAG, "verifier": self.verifier},
        )
        values: dict[str, Any] = own | {"threshold": self.threshold, "sandbox": self.sandbox}
        for name in ("test_seconds", "program_seconds", "memory_mb"):
            values[name] = getattr(limits, name)
        try:
            return JudgingConfig(**values)
        except ValidationError as error:
            raise UserError(f"--{validation_message(error)}") from None

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(
            n=self.repeats,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            seed=self.seed,
            raw_logprobs=True,
            top_logprobs=self.top_logprobs,
        )

    def settings(self, model: str) -> dict[str, Any]:
        """Return what ``settings.json`` holds of the samples of ``model``."""
        saved = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.metadata.get("saved")
        }
        saved |= {"top_logprobs": self.top_logprobs, "model": model}
        # not in the settings of evaluations that know no other
        saved |= {} if self.marker == CONFIDENCE_TAG else {"marker": self.marker}
        saved |= {} if self.thinking == "off" else {"thinking": self.thinking}
        saved |= (
            {"verifier": self.verifier, "threshold": self.threshold}
            if reads_rows(self.verifier)
            else {}
        )
        return saved | ({"tokenizer": self.tokenizer} if self.tokenizer else {})


def run_evaluation(config: EvaluationConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Sample (or read), judge, score, and write everything to ``config.out``; returns what
    ``evaluation.json`` holds.

    Under ``dcpo launch N`` every rank is an engine that samples and judges its share of the prompts
    of ``model``; the first one scores and writes, and the others return nothing. Raises
    :class:`UserError` on bad input, as early as it can be known.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not config.model:
        raise UserError(
            f"{ranks} processes were started, but only --model is sampled by several; leave out "
            "dcpo launch"
        )
    kinds = parse_kinds(config.confidence)
    predictor = Posthoc.load(config.posthoc) if config.posthoc else None
    before = _evaluation_beside(config.samples) if config.samples else {}
    config = replace(
        config,
        features=config.features or (predictor is not None and predictor.method == "confclass"),
        marker=config.marker or before.get("marker") or CONFIDENCE_TAG,
    )
    if config.samples:
        samples, model = _old_samples(config), before.get("model", "")
    else:
        samples, model = _new_samples(config, progress, ranks)
        if int(os.environ.get("RANK", "0")):
            return {}
    if predictor is not None:
        samples = predictor.apply(samples)
        kinds = tuple(dict.fromkeys((*kinds, "posthoc")))
    evaluation = score_samples(samples, kinds, model, resamples=config.resamples, seed=config.seed)
    if config.marker != CONFIDENCE_TAG:
        evaluation["marker"] = config.marker
    write_evaluation(config.out, evaluation, samples)
    if config.rejudge or not config.samples:
        check_error_rate(
            [sample.judgement for sample in samples],
            config.judging.max_error_rate,
            f"{len(samples)} written to {config.out}",
        )
    return evaluation


def _evaluation_beside(samples: str) -> dict[str, Any]:
    """Return the evaluation.json beside old samples, nothing where there is none."""
    path = Path(samples).with_name("evaluation.json")
    return read_json_object(path) if path.exists() else {}


# -------------------------------------------------------------------------------- samples of before


def _old_samples(config: EvaluationConfig) -> list[Sample]:
    """Read the responses of an earlier evaluation, judged anew where asked for."""
    assert config.samples is not None
    samples = read_samples(config.samples)
    if not samples:
        raise UserError(f"{config.samples}: no samples in it")
    sampled = Path(config.out, SETTINGS).is_file() and not config.fresh
    if sampled and Path(config.out).resolve() != Path(config.samples).resolve().parent:
        raise UserError(
            f"--out {config.out} holds the samples of another evaluation; name another one, or "
            "--fresh"
        )
    keys = {sample.prompt.ground_truth for sample in samples if is_code(sample)}
    tests_file = Path(config.samples).with_name(TESTS_FILE)
    tests = read_tests(tests_file, keys) if keys and (config.rejudge or tests_file.exists()) else {}
    if tests:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        write_tests(tests, Path(config.out) / TESTS_FILE)
    return _judge_again(samples, tests, config) if config.rejudge else samples


def _judge_again(
    samples: list[Sample], tests: PackedTests, config: EvaluationConfig
) -> list[Sample]:
    """Judge programs and everything else again, each by their judge, in the order given."""
    find, otherwise = (
        verifiers(config.judging, tests),
        "math" if config.verifier == "code" else config.verifier,
    )
    names = [
        "code"
        if is_code(sample)
        else VERIFIER
        if "reasoning_gym" in (sample.prompt.row or {})
        else verifier_for(sample.prompt.form, otherwise, sample.prompt.task in BENCHMARKS)
        for sample in samples
    ]
    judged: dict[int, Sample] = {}
    for name in dict.fromkeys(names):
        places = [place for place, own in enumerate(names) if own == name]
        if places:
            judge = judge_of(config.judging, find, name)
            judged |= dict(
                zip(
                    places,
                    rejudge([samples[p] for p in places], judge, equivalence(name)),
                    strict=True,
                )
            )
    return [judged[place] for place in range(len(samples))]


# -------------------------------------------------------------------------------------- new samples


def _new_samples(
    config: EvaluationConfig, progress: Progress | None, ranks: int
) -> tuple[list[Sample], str]:
    """Sample the model or the server on every benchmark and judge; and the name of the model. Of
    several ``ranks`` each samples its share, and gets what all have.
    """
    if not config.benchmarks:
        raise UserError(
            "--benchmarks is missing; name at least one, for instance --benchmarks math500"
        )
    find_template(config.template)
    # Everything that can be wrong with the data, or with running programs here, is known before the
    # model is loaded.
    options = config.data_dir, config.corrections, config.untested
    loaded = load_problems(config.benchmarks, config.judging, *options)
    tests = {key: packed for problems in loaded for key, packed in problems.tests.items()}
    benchmarks = [problems.benchmark for problems in loaded]
    if ranks > 1:
        from megatron_dcpo.runtime import distributed

        distributed.initialize(timeout_minutes=_LONGEST_MINUTES)
    rank = int(os.environ.get("RANK", "0"))
    wanted = {
        (b.name, record.prompt_id) for b in benchmarks for record in b.records[: config.limit]
    }
    weights = {"weights": _weights(Path(config.model))} if config.model else {}
    if config.model and rank == 0 and not config.fresh:  # before it is loaded
        check_samples(
            Path(config.out), config.settings(config.model) | weights, wanted, config.repeats
        )
    model, tokens, render, complete = (
        _server(config) if config.endpoint else _local_model(config, benchmarks)
    )
    if config.endpoint and not config.fresh:
        check_samples(Path(config.out), config.settings(model), wanted, config.repeats)
    samples: list[Sample] = []
    with (
        SampleLog(config.out, config.settings(model) | weights, config.fresh)
        if rank == 0
        else nullcontext() as log
    ):
        if tests and rank == 0:
            write_tests(tests, Path(config.out) / TESTS_FILE)
        for problems in loaded:
            samples += evaluate_benchmark(
                problems.benchmark,
                render(problems.benchmark)[rank::ranks],
                complete,
                repeats=config.repeats,
                judge=partial(problems.judge, tokens=tokens),
                equivalent=problems.equivalent,
                log=log,
                keep_features=config.features,
                progress=progress,
            )
    if ranks > 1:
        order = {
            (b.name, record.prompt_id): n for b in benchmarks for n, record in enumerate(b.records)
        }
        place = {benchmark.name: number for number, benchmark in enumerate(benchmarks)}
        samples = [sample for part in distributed.all_gather_objects(samples) for sample in part]
        samples.sort(
            key=lambda s: (
                place[s.prompt.task],
                order[s.problem_key],
                s.response.sample_index,
            )
        )  # as of one process
        distributed.destroy()
    return samples, model


def _weights(model: Path) -> dict[str, list[int]]:
    """Return size and time (ns) of a model's files: a directory may hold other weights under the
    same name later.
    """
    files = sorted(
        path for path in model.glob("*") if path.suffix in (".safetensors", ".bin", ".json")
    )
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _server(config: EvaluationConfig) -> tuple[str, TokenBytes, Render, Complete]:
    """Name of the model, its tokens, the prompts of a benchmark (messages, or with ``tokenizer``
    ids), the samples of ``endpoint``. Without ``tokenizer`` nothing is known of the tokens but that
    ``<think>`` opens a thinking.
    """
    from megatron_dcpo.rollout import load_tokenizer

    assert config.endpoint is not None
    if config.tokenizer and config.api == "chat":
        raise UserError(
            "--tokenizer sends token ids, which only --api completions takes; leave one of the "
            "two out"
        )
    if config.thinking == "on" and not config.tokenizer:
        raise UserError(
            "--thinking on needs --tokenizer DIR, which renders the prompts here; or leave it "
            "out, and switch the server "
            """with --extra-body '{"chat_template_kwargs": {"enable_thinking": true}}'"""
        )
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    tokens = token_bytes(tokenizer) if config.tokenizer else TokenBytes((), KNOWN[0])
    check_thinking(config.thinking, tokens.thinking, config.tokenizer or "")
    api_key = os.environ.get(config.api_key_env) or None
    model = config.model_name or served_model(config.endpoint, api_key)
    endpoint = Endpoint(
        config.endpoint,
        model,
        config.sampling,
        api=config.api
        or (
            "chat"
            if find_template(config.template).chat and not config.tokenizer
            else "completions"
        ),
        api_key=api_key,
        concurrency=config.concurrency,
        timeout=config.timeout,
        attempts=config.attempts,
        extra_body={**keep_thinking(tokenizer, tokens.thinking), **config.extra_body},
    )

    def as_messages(benchmark: LoadedBenchmark) -> list[Prompt]:
        return message_prompts(
            benchmark.records, config.template, config.limit, config.marker or CONFIDENCE_TAG
        )

    return (
        model,
        tokens,
        partial(as_ids, config, tokenizer) if config.tokenizer else as_messages,
        endpoint.complete,
    )


def as_ids(config: EvaluationConfig, tokenizer: Any, benchmark: LoadedBenchmark) -> list[Prompt]:
    """Return the prompts of a benchmark as training has them: through its template and the
    tokenizer.
    """
    return render_prompts(
        benchmark.records,
        tokenizer,
        config.template,
        limit=config.limit,
        marker=config.marker or CONFIDENCE_TAG,
        source=benchmark.name,
        thinking=config.thinking,
    )


def _local_model(
    config: EvaluationConfig, loaded: Sequence[LoadedBenchmark]
) -> tuple[str, TokenBytes, Render, Complete]:
    """Return the same for a checkpoint directory, sampled in this process."""
    from megatron_dcpo.rollout import build_local_engine, load_tokenizer
    from megatron_dcpo.rollout.engine import check_model_dir

    assert config.model is not None
    check_model_dir(config.model)
    tokenizer = load_tokenizer(config.model)
    tokens = token_bytes(tokenizer)
    check_thinking(config.thinking, tokens.thinking, config.model)
    prompts = [len(p.token_ids) for b in loaded for p in as_ids(config, tokenizer, b)]
    gpu = capabilities().separate_memory
    many = gpu and choose_engine(config.engine, config.model) == "vllm"
    options = VllmOptions(
        dtype=config.dtype if config.dtype != "auto" else "bfloat16" if gpu else "float32",
        gpu_memory_utilization=0.9 if many else 0.6,
        max_model_len=max(prompts, default=0) + config.max_tokens,
        max_num_seqs=config.batch_size or (512 if many else 64),
        sleep=False,
        raw_logprobs=True,
        seed=config.seed,
    )
    engine = build_local_engine(config.engine, config.model, options)
    stream = partial(engine.stream, sampling=config.sampling)
    complete = complete_at_once(stream, tokens, engine.eos_token_ids)
    return config.model, tokens, partial(as_ids, config, tokenizer), complete
