"""Held-out problems and what judges them: for an evaluation, and for the validation of a run that
trains.
"""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_dcpo.config import Config, JudgingConfig, SourceConfig, ValidationConfig
from megatron_dcpo.config.field_types import QUESTIONS
from megatron_dcpo.data import BENCHMARKS, LoadedBenchmark, load_benchmark, render_prompts
from megatron_dcpo.data.benchmarks import name_of, parse_specs
from megatron_dcpo.data.datasets import task_name
from megatron_dcpo.data.gym import VERIFIER, is_gym
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.evaluation.evaluate import Equivalent, Judge, equivalent_math, evaluate_benchmark
from megatron_dcpo.evaluation.programs import same_program
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.scoring import BETTER, headline, score_samples
from megatron_dcpo.judging.judge import judge_many, with_text
from megatron_dcpo.judging.programs import PackedTests
from megatron_dcpo.judging.questions import check_questions, same_answer
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.judging.verifiers import FindVerifier, is_users, verifier_for, verifiers
from megatron_dcpo.types import Judgement, Prompt, Response

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problems:
    """A benchmark with what judges its responses; ``tests``: of its programs, by their key."""

    benchmark: LoadedBenchmark
    tests: PackedTests
    judge: Callable[
        ..., Sequence[Judgement]
    ]  # a ``Judge``, which takes the ``tokens`` of the tokenizer as well
    equivalent: Equivalent


def load_problems(
    benchmarks: str,
    judging: JudgingConfig,
    *options: Any,
    own: Mapping[str, str] | None = None,
    **more: Any,
) -> list[Problems]:
    """Load the ``benchmarks`` of a list of names and files; ``options`` are those of
    ``load_benchmark``.

    Programs are judged by their tests, problems of Reasoning Gym by its scorers; everything else by
    the verifier that ``own`` has under the benchmark's name, or else by that of ``judging``, where
    it is for this form of answer.

    Raises :class:`UserError` for everything that can be wrong with the data, or with running
    programs here.
    """
    otherwise = "math" if judging.verifier == "code" else judging.verifier
    named = {name_of(spec): spec for spec in parse_specs(benchmarks)}
    wanted = {name: (own or {}).get(name, otherwise) for name in named}
    loaded = [
        load_benchmark(spec, *options, **more | {"keep_columns": is_users(wanted[name])})
        for name, spec in named.items()
    ]
    for warning in (text for benchmark in loaded for text in benchmark.warnings):
        logger.warning(warning)
    tests_of = [{r.answer: r.tests for r in b.records if r.tests is not None} for b in loaded]
    tests = dict(ChainMap(*tests_of))
    find = verifiers(judging, tests)
    problems = []
    for benchmark, its_tests in zip(loaded, tests_of, strict=True):
        form = benchmark.records[0].form
        asked = verifier_for(form, wanted[benchmark.name], benchmark.name in BENCHMARKS)
        name = "code" if its_tests else VERIFIER if benchmark.is_gym else asked
        check_questions(name, benchmark.records, benchmark.source)
        problems.append(
            Problems(benchmark, its_tests, judge_of(judging, find, name), equivalence(name))
        )
    return problems


def equivalence(verifier: str) -> Equivalent:
    """Return what decides whether two answers that ``verifier`` judges are the same."""
    return (
        same_program
        if verifier == "code"
        else same_answer
        if verifier in QUESTIONS
        else equivalent_math
    )


def verifier_of(source: SourceConfig, judging: JudgingConfig) -> str:
    """Return the name of the verifier of a source of problems: its own, Reasoning Gym's, or
    ``judging.verifier``.
    """
    return source.verifier or (VERIFIER if is_gym(source.path) else judging.verifier)


def named_sources(config: Config) -> dict[str, SourceConfig]:
    """Return the sources of ``data.path`` by their names. Raises :class:`UserError` for two of one
    name.
    """
    named: dict[str, SourceConfig] = {}
    for source in config.data.sources:
        name = source.name or task_name(source.path)
        if name in named:
            raise UserError(
                f"data.path: two sources are called {name}; give one of them another name"
            )
        named[name] = source
    return named


def judge_of(judging: JudgingConfig, find: FindVerifier, name: str) -> Judge:
    """Return the judge of the verifier ``name``."""
    verifier, form = find(name)
    return partial(judge_many, marker=judging.marker, verifier=verifier, form=form)


# ----------------------------------------------------------------------------------------- of a run


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of a training run. ``prompts``: of all benchmarks, in order, by their
    id.
    """

    problems: Sequence[Problems]
    prompts: Mapping[str, Prompt]
    tokens: TokenBytes
    repeats: int

    @property
    def longest(self) -> int:
        """Return the length of the longest prompt in tokens."""
        return max(len(prompt.token_ids) for prompt in self.prompts.values())

    def judged(self, responses: Sequence[Response], eos_ids: Sequence[int]) -> list[Sample]:
        """Return the responses to any of the prompts, judged by their text as in an evaluation.

        The samples have no log-probs: an engine that trains gives those of the distribution that
        was sampled.
        """
        samples: list[Sample] = []
        own: dict[str, list[Response]] = {problems.benchmark.name: [] for problems in self.problems}
        for response in responses:
            own[self.prompts[response.prompt_id].task].append(
                response if response.text is not None else with_text(response, self.tokens, eos_ids)
            )
        for problems in self.problems:
            found = own[problems.benchmark.name]
            samples += evaluate_benchmark(
                problems.benchmark,
                [
                    self.prompts[prompt_id]
                    for prompt_id in dict.fromkeys(r.prompt_id for r in found)
                ],
                lambda _, found=found: [found],  # type: ignore[misc]
                repeats=self.repeats,
                judge=partial(problems.judge, tokens=self.tokens),
                equivalent=problems.equivalent,
            )
        return [
            sample.measured(token_confidence=None, min_logprob=None, reasoning_logprob=None)
            for sample in samples
        ]

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return ``evaluation/BENCHMARK/METRIC``, as ``dcpo evaluate`` has them of the stated
        confidence; undefined ones NaN.

        ``samples`` may come in any order.
        """
        place = {prompt_id: position for position, prompt_id in enumerate(self.prompts)}
        ordered = sorted(
            samples,
            key=lambda sample: (place[sample.prompt.prompt_id], sample.response.sample_index),
        )
        scored = score_samples(ordered, ("verbal",), resamples=0)
        values: dict[str, float] = {}
        for name, scores in scored["benchmarks"].items():
            lengths = ("mean_length", "mean_thinking", "truncated_rate")
            shown = headline(scored, "verbal", name) | {
                key: scores[key] for key in lengths if key in scores
            }
            shown |= {
                f"abstention_{key}": value for key, value in scores.get("abstention", {}).items()
            }
            values |= {
                f"evaluation/{name}/{key}": math.nan if value is None else float(value)
                for key, value in shown.items()
                if key != "n"
            }
        return values


def load_held_out(config: Config, tokenizer: Any, tokens: TokenBytes) -> HeldOut | None:
    """Return what ``evaluation`` of a run asks for; None where it is off. Raises
    :class:`UserError`.
    """
    options, judging = config.evaluation, config.judging
    if not options.interval:
        return None
    check_validation(config)
    sources = {} if isinstance(config.data.path, str) else named_sources(config)
    own = {name: verifier_of(source, judging) for name, source in sources.items()}
    problems = load_problems(
        benchmark_list(options), judging, own=own, untested=config.data.untested
    )
    prompts: dict[str, Prompt] = {}
    for one in problems:
        name = one.benchmark.name
        rendered = render_prompts(
            one.benchmark.records,
            tokenizer,
            (sources[name].template if name in sources else None) or config.data.template,
            limit=options.limit or None,
            marker=judging.marker,
            source=name,
            thinking=config.data.thinking,
        )
        prompts |= {prompt.prompt_id: prompt for prompt in rendered}
    return HeldOut(problems, prompts, tokens, options.samples)


def benchmark_list(options: ValidationConfig) -> str:
    """Return ``evaluation.benchmarks`` as ``dcpo evaluate --benchmarks`` takes it."""
    return (
        options.benchmarks if isinstance(options.benchmarks, str) else ",".join(options.benchmarks)
    )


def benchmark_names(options: ValidationConfig) -> list[str]:
    """Return the names of the benchmarks of a run, as its metrics have them."""
    specs = parse_specs(benchmark_list(options))
    return [name_of(spec) for spec in specs]


def check_validation(config: Config) -> None:
    """Raise :class:`UserError` for a benchmark or a metric that does not exist. Reads no data."""
    names, training = benchmark_names(config.evaluation), config.training
    if not (word := training.keep_best):
        return
    benchmark, _, metric = word.removeprefix("evaluation/").rpartition("/")
    if metric not in BETTER:
        hint = did_you_mean(metric, BETTER)
        raise UserError(
            f"training.keep_best={word}: no benchmark gives a metric {metric!r} with a "
            f"direction{hint}"
        )
    if benchmark and benchmark not in names:
        raise UserError(
            f"training.keep_best={word}: evaluation.benchmarks has no {benchmark!r}; write "
            f"{names[0]}/{metric}, or "
            f"{metric} for the mean of {', '.join(names)}"
        )


def value_of(metrics: Mapping[str, float], word: str) -> float:
    """Return what ``training.keep_best`` names: ``BENCHMARK/METRIC``, or ``METRIC``, its mean over
    the benchmarks.
    """
    benchmark, _, metric = word.removeprefix("evaluation/").rpartition("/")
    wanted = f"evaluation/{benchmark}/{metric}" if benchmark else f"/{metric}"
    found = [value for key, value in metrics.items() if key.endswith(wanted)]
    return sum(found) / len(found) if found else math.nan


def improves(word: str, metrics: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
    """Return whether ``metrics`` are better than the ``best`` before; an undefined value never is."""
    new, old = value_of(metrics, word), math.nan if best is None else value_of(best, word)
    return not math.isnan(new) and (
        math.isnan(old) or (new != old and BETTER[word.rpartition("/")[2]](new, old) == new)
    )
