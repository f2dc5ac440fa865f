"""The held-out problems of a training run, which its validation asks, judges and measures."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_dcpo.config import Config, SourceConfig, ValidationConfig
from megatron_dcpo.data.benchmarks import name_of, parse_specs
from megatron_dcpo.data.datasets import PromptOptions, render_prompts
from megatron_dcpo.data.problem_kinds import check_kinds
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.evaluation.evaluate import AnswerJudge, evaluate_benchmark
from megatron_dcpo.evaluation.headline import METRICS, parts
from megatron_dcpo.evaluation.problems import Problems, load_problems
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.scoring import OF_A_TURN, headline, score_samples
from megatron_dcpo.judging.judge import with_text
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Prompt, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of a training run, with the ``prompts`` of all benchmarks, in order, by
    their ids, the number of responses to each (``repeats``), and what their ``kinds`` are named by
    (``evaluation.kinds``).
    """

    problems: Sequence[Problems]
    prompts: Mapping[str, Prompt]
    tokens: TokenBytes
    repeats: int
    kinds: str = ""

    @property
    def longest(self) -> int:
        """Return the length of the longest prompt in tokens."""
        return max(len(prompt.token_ids) for prompt in self.prompts.values())

    def judged(self, responses: Sequence[Response], eos_ids: Sequence[int]) -> list[Sample]:
        """Return the responses to any of the prompts, judged by their text as in an evaluation.

        The samples have no log-probs, because the engine of a training run returns those of the
        sampling distribution, with its temperature.
        """
        by_benchmark: dict[str, list[Response]] = {}
        for problems in self.problems:
            by_benchmark[problems.benchmark.name] = []
        for response in responses:
            if response.text is None:
                response = with_text(response, self.tokens, eos_ids)
            by_benchmark[self.prompts[response.prompt_id].task].append(response)
        samples: list[Sample] = []
        for problems in self.problems:
            samples += self._judged(problems, by_benchmark[problems.benchmark.name])
        unknown = {"token_confidence": None, "min_logprob": None, "reasoning_logprob": None}
        return [sample.measured(**unknown) for sample in samples]

    def _judged(self, problems: Problems, responses: Sequence[Response]) -> list[Sample]:
        prompt_ids = dict.fromkeys(response.prompt_id for response in responses)
        return evaluate_benchmark(
            [self.prompts[prompt_id] for prompt_id in prompt_ids],
            lambda _: [responses],
            repeats=self.repeats,
            judged_by=AnswerJudge(partial(problems.judge, tokens=self.tokens), problems.equivalent),
        )

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return ``evaluation/BENCHMARK/METRIC`` for the stated confidence, as ``dcpo evaluate``
        computes them; undefined values are NaN.

        ``samples`` may come in any order.
        """
        position = {prompt_id: number for number, prompt_id in enumerate(self.prompts)}
        ordered = sorted(
            samples,
            key=lambda sample: (position[sample.prompt.prompt_id], sample.response.sample_index),
        )
        scored = score_samples(ordered, ("verbal",), resamples=0, kinds_by=self.kinds)
        values: dict[str, float] = {}
        for name, scores in scored["benchmarks"].items():
            shown = headline(scored, "verbal", name)
            del shown["n"]
            for key in ("mean_length", "mean_thinking", "truncated_rate"):
                if key in scores:
                    shown[key] = scores[key]
            for key, value in scores.get("abstention", {}).items():
                shown[f"abstention_{key}"] = value
            for turn, of_turn in scores.get("turns", {}).get("by_turn", {}).items():
                for key in OF_A_TURN:
                    shown[f"turn_{turn}_{key}"] = of_turn[key]
            for key, value in shown.items():
                values[f"evaluation/{name}/{key}"] = math.nan if value is None else float(value)
        return values


def benchmark_names(options: ValidationConfig) -> list[str]:
    """Return the names of a run's benchmarks as its metrics spell them."""
    return [name_of(spec) for spec in parse_specs(options.benchmark_list)]


def check_keep_best(config: Config) -> None:
    """Raise :class:`UserError` for a benchmark or a metric that does not exist. Reads no data."""
    names = benchmark_names(config.evaluation)
    word = config.training.keep_best
    if not word:
        return
    benchmark, metric = parts(word)
    known = [name for name, shown in METRICS.items() if shown.better is not None]
    if metric not in known:
        hint = did_you_mean(metric, known)
        raise UserError(
            f"training.keep_best={word}: no benchmark gives a metric {metric!r} with a "
            f"direction{hint}"
        )
    if benchmark and benchmark not in names:
        raise UserError(
            f"training.keep_best={word}: evaluation.benchmarks has no {benchmark!r}; write "
            f"{names[0]}/{metric}, or {metric} for the mean of {', '.join(names)}"
        )


def load_held_out(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    tokens: TokenBytes,
    date: datetime.date | None = None,
) -> HeldOut | None:
    """Return the held-out problems that a run's ``evaluation`` section names; None if it is off.

    Chat templates write the ``date``. Raises :class:`UserError`.
    """
    options = config.evaluation
    if not options.interval:
        return None
    check_keep_best(config)
    sources: Sequence[SourceConfig] = ()
    if not isinstance(config.data.path, str):
        sources = config.data.sources
    problems = load_problems(
        options.benchmark_list,
        config.judging,
        sources=sources,
        reading=RowOptions(
            columns=config.data.columns, row=config.data.row, unread=config.data.unread
        ),
    )
    prompts: dict[str, Prompt] = {}
    for one in problems:
        template = one.template or config.data.template
        rendered = render_prompts(
            one.benchmark.records,
            tokenizer,
            PromptOptions(
                template=template,
                limit=options.limit or None,
                marker=config.judging.marker,
                thinking=config.data.thinking,
                date=date,
            ),
            source=one.benchmark.name,
        )
        prompts.update({prompt.prompt_id: prompt for prompt in rendered})
    check_kinds(list(prompts.values()), options.kinds)
    return HeldOut(problems, prompts, tokens, repeats=options.samples, kinds=options.kinds)
