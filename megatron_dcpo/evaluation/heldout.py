"""Held-out problems and what judges them: for an evaluation, and for the validation of a run that trains."""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_dcpo.config import Config, JudgingConfig, ValidationConfig
from megatron_dcpo.data import LoadedBenchmark, load_benchmark, render_prompts
from megatron_dcpo.data.benchmarks import find_benchmark, parse_specs
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.evaluation.evaluate import Equivalent, Judge, equivalent_math, evaluate_benchmark
from megatron_dcpo.evaluation.programs import same_program
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.scoring import BETTER, headline, score_samples
from megatron_dcpo.judging.judge import judge_many, with_text
from megatron_dcpo.judging.programs import PackedTests
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.judging.verifiers import FindVerifier, is_users, verifiers
from megatron_dcpo.types import Prompt, Response

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problems:
    """A benchmark with what judges its responses; ``tests``: of its programs, by their key."""

    benchmark: LoadedBenchmark
    tests: PackedTests
    judge: Judge
    equivalent: Equivalent


def load_problems(benchmarks: str, judging: JudgingConfig, *options: Any, **more: Any) -> list[Problems]:
    """Load the ``benchmarks`` of a list of names and files; ``options`` are those of ``load_benchmark``. A user's verifier
    judges all of them, but for programs that have tests.

    Raises :class:`UserError` for everything that can be wrong with the data, or with running programs here.
    """
    more["keep_columns"] = is_users(judging.verifier)
    loaded = [load_benchmark(spec, *options, **more) for spec in parse_specs(benchmarks)]
    for warning in (text for benchmark in loaded for text in benchmark.warnings):
        logger.warning(warning)
    tests_of = [{r.answer: r.tests for r in b.records if r.tests is not None} for b in loaded]
    tests = dict(ChainMap(*tests_of))
    find, otherwise = verifiers(judging, tests), judging.verifier if is_users(judging.verifier) else "math"
    return [
        Problems(
            b, own, judge_of(judging, find, "code" if own else otherwise), same_program if own else equivalent_math
        )
        for b, own in zip(loaded, tests_of, strict=True)
    ]


def judge_of(judging: JudgingConfig, find: FindVerifier, name: str) -> Judge:
    """Return the judge of the verifier ``name``."""
    verifier, form = find(name)
    return partial(judge_many, marker=judging.marker, verifier=verifier, form=form)


# ------------------------------------------------------------------------------------------------ of a run


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of a training run. ``prompts``: of all benchmarks, in order, by their id."""

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

        The samples have no log-probs: an engine that trains gives those of the distribution that was sampled.
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
                [self.prompts[prompt_id] for prompt_id in dict.fromkeys(r.prompt_id for r in found)],
                lambda _, found=found: [found],  # type: ignore[misc]
                repeats=self.repeats,
                judge=problems.judge,
                equivalent=problems.equivalent,
            )
        return [replace(s, token_confidence=None, min_logprob=None, reasoning_logprob=None) for s in samples]

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return ``evaluation/BENCHMARK/METRIC``, as ``dcpo evaluate`` has them of the stated confidence; undefined
        ones NaN.

        ``samples`` may come in any order.
        """
        place = {prompt_id: position for position, prompt_id in enumerate(self.prompts)}
        ordered = sorted(samples, key=lambda sample: (place[sample.prompt_id], sample.repeat))
        scored = score_samples(ordered, ("verbal",), resamples=0)
        values: dict[str, float] = {}
        for name, scores in scored["benchmarks"].items():
            shown = headline(scored, "verbal", name) | {key: scores[key] for key in ("mean_length", "truncated_rate")}
            values |= {
                f"evaluation/{name}/{key}": math.nan if value is None else float(value)
                for key, value in shown.items()
                if key != "n"
            }
        return values


def load_held_out(config: Config, tokenizer: Any, tokens: TokenBytes) -> HeldOut | None:
    """Return what ``evaluation`` of a run asks for; None where it is off. Raises :class:`UserError`."""
    options, judging = config.evaluation, config.judging
    if not options.interval:
        return None
    check_validation(config)
    problems = load_problems(benchmark_list(options), judging, untested=config.data.untested)
    prompts: dict[str, Prompt] = {}
    for one in problems:
        name = one.benchmark.name
        rendered = render_prompts(
            one.benchmark.records,
            tokenizer,
            config.data.template,
            limit=options.limit or None,
            marker=judging.marker,
            source=name,
        )
        prompts |= {prompt.prompt_id: prompt for prompt in rendered}
    return HeldOut(problems, prompts, tokens, options.samples)


def benchmark_list(options: ValidationConfig) -> str:
    """Return ``evaluation.benchmarks`` as ``dcpo evaluate --benchmarks`` takes it."""
    return options.benchmarks if isinstance(options.benchmarks, str) else ",".join(options.benchmarks)


def benchmark_names(options: ValidationConfig) -> list[str]:
    """Return the names of the benchmarks of a run, as its metrics have them."""
    specs = parse_specs(benchmark_list(options))
    return [s.partition("=")[0].strip() if "=" in s else find_benchmark(s.partition(":")[0]).name for s in specs]


def check_validation(config: Config) -> None:
    """Raise :class:`UserError` for a benchmark or a metric that does not exist. Reads no data."""
    names, training = benchmark_names(config.evaluation), config.training
    if not (word := training.keep_best):
        return
    benchmark, _, metric = word.removeprefix("evaluation/").rpartition("/")
    if metric not in BETTER:
        hint = did_you_mean(metric, BETTER)
        raise UserError(f"training.keep_best={word}: no benchmark gives a metric {metric!r} with a direction{hint}")
    if benchmark and benchmark not in names:
        raise UserError(
            f"training.keep_best={word}: evaluation.benchmarks has no {benchmark!r}; write {names[0]}/{metric}, or "
            f"{metric} for the mean of {', '.join(names)}"
        )


def value_of(metrics: Mapping[str, float], word: str) -> float:
    """Return what ``training.keep_best`` names: ``BENCHMARK/METRIC``, or ``METRIC``, its mean over the benchmarks."""
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
