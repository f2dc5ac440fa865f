"""Accuracy and calibration of a model: sample, judge, score, write. The engine is a function, so
none is known here.

benchmarks --render--> prompts --complete--> responses --judge--> samples.jsonl --score-->
evaluation.json, pictures
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dcpo import codec
from megatron_dcpo.calibration import diagrams
from megatron_dcpo.data import LoadedBenchmark
from megatron_dcpo.evaluation.posthoc import features
from megatron_dcpo.evaluation.report import summary_of, write_report
from megatron_dcpo.evaluation.runs import EvaluatedRun, read_run
from megatron_dcpo.evaluation.samples import (
    Measures,
    Sample,
    SampleLog,
    geometric_mean_probability,
    mean_entropy,
    with_consistency,
    write_samples,
)
from megatron_dcpo.evaluation.scoring import bins_from_json
from megatron_dcpo.judging.judge import JUDGES, Judge, judge_many, with_text
from megatron_dcpo.judging.math.pool import equivalent_many
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Judgement, Prompt, Response

Stream = Callable[
    [Sequence[tuple[Prompt, int]]], Iterable[Sequence[Response]]
]  # of an engine in this process
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """A problem and which of its repeats are still to be sampled."""

    prompt: Prompt
    repeats: tuple[int, ...]


Complete = Callable[
    [Sequence[Request]], Iterable[Sequence[Response]]
]  # with their text, in any order, a few at a time
Equivalent = Callable[[str, str], bool]


def equivalent_math(a: str, b: str) -> bool:
    """Return whether two boxed answers are the same number, set, expression ..."""
    return equivalent_many([(a, b)])[0]


def evaluate_benchmark(
    benchmark: LoadedBenchmark,
    prompts: Sequence[Prompt],
    complete: Complete,
    *,
    repeats: int,
    judge: Judge = judge_many,
    equivalent: Equivalent = equivalent_math,
    log: SampleLog | None = None,
    keep_features: bool = False,
    progress: Progress | None = None,
) -> list[Sample]:
    """Sample every prompt of a benchmark ``repeats`` times and judge the responses while others are
    sampled.

    Responses are matched by prompt id and repeat, never by position, so that the samples do not
    depend on the order in which an engine finishes. What ``log`` holds already is not asked for;
    what is new is written to it as soon as it is judged, also where the rest does not come.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    total = len(by_id) * repeats
    logged = log.finished(benchmark.name) if log else {}
    samples = {
        key: sample for key, sample in logged.items() if key[0] in by_id and key[1] < repeats
    }
    missing = [
        (p, tuple(r for r in range(repeats) if (p.prompt_id, r) not in samples)) for p in prompts
    ]
    requests = [Request(prompt, left) for prompt, left in missing if left]
    if progress is not None:
        progress(benchmark.name, len(samples), total)
    judged: deque[tuple[Sequence[Response], Future[Sequence[Judgement]]]] = deque()

    def keep(responses: Sequence[Response], judgements: Future[Sequence[Judgement]]) -> None:
        for response, judgement in zip(responses, judgements.result(), strict=True):
            sample = _sample(by_id[response.prompt_id], response, judgement, keep_features)
            samples[response.key] = sample
            if log is not None:
                log.add(sample)
        if progress is not None:
            progress(benchmark.name, len(samples), total)

    try:
        for responses in complete(requests) if requests else ():
            judged.append((responses, JUDGES.submit(judge, responses, by_id)))
            while judged and judged[0][1].done():
                keep(*judged.popleft())
    finally:
        while judged:
            keep(*judged.popleft())
    order = {prompt.prompt_id: position for position, prompt in enumerate(prompts)}
    ordered = sorted(
        samples.values(),
        key=lambda sample: (order[sample.prompt.prompt_id], sample.response.sample_index),
    )
    return with_consistency(ordered, equivalent)


def complete_at_once(stream: Stream, tokens: TokenBytes, eos_ids: Collection[int]) -> Complete:
    """Return an engine in this process as ``Complete``: it gets all requests together, and how many
    run at once is its affair.

    ``eos_ids``: the tokens that end a response, no part of its text.
    """

    def complete(requests: Sequence[Request]) -> Iterator[list[Response]]:
        for responses in stream(
            [(request.prompt, repeat) for request in requests for repeat in request.repeats]
        ):
            yield [r if r.text is not None else with_text(r, tokens, eos_ids) for r in responses]

    return complete


def rejudge(
    samples: Sequence[Sample], judge: Judge = judge_many, equivalent: Equivalent = equivalent_math
) -> list[Sample]:
    """Return the same responses judged again, for instance by a better verifier.

    What precedes the answer of a model that thinks is known from the first judgement, and so is
    what depends on the tokens, which a sample does not keep.
    """
    prompts: dict[str, Prompt] = {}
    responses = []
    for index, sample in enumerate(samples):
        prompt = sample.prompt
        row = prompt.row or {"problem": prompt.problem, "answer": prompt.ground_truth}
        prompt_id = str(index)  # two benchmarks may have problems of one id
        prompts[prompt_id] = replace(prompt, prompt_id=prompt_id, row=row)
        text = sample.response.text or ""
        answer = text[sample.judgement.thinking_characters :]
        responses.append(replace(sample.response, prompt_id=prompt_id, text=answer))
    judged = []
    for sample, judgement in zip(samples, judge(responses, prompts), strict=True):
        first = sample.judgement
        again = replace(
            judgement,
            prompt_id=first.prompt_id,
            boundary=first.boundary,
            length=first.length,
            marker_end=first.marker_end,
            thinking_tokens=first.thinking_tokens,
            thinking_characters=first.thinking_characters,
        )
        judged.append(replace(sample, judgement=again))
    return with_consistency(judged, equivalent)


def write_evaluation(
    directory: str | Path, evaluation: Mapping[str, Any], samples: Sequence[Sample], title: str = ""
) -> None:
    """Write ``evaluation.json``, ``samples.jsonl``, ``report.html``, and ``diagrams/`` per
    benchmark and kind of confidence.
    """
    root = Path(directory)
    pictures = root / "diagrams"
    root.mkdir(parents=True, exist_ok=True)
    write_samples(samples, root / "samples.jsonl")
    text = json.dumps(evaluation, indent=1, allow_nan=False, ensure_ascii=False)
    (root / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    run = read_run(root)
    names: list[str | None] = [*evaluation["benchmarks"]]
    for benchmark in names if len(names) == 1 else [None, *names]:
        _draw(
            evaluation["benchmarks"][benchmark] if benchmark else evaluation["overall"],
            run,
            benchmark,
            pictures,
        )
    if len(names) > 1:
        _draw_grids(evaluation["benchmarks"], pictures)
    write_report(
        [run], root / "report.html", title or f"Evaluation of {evaluation['model'] or run.name}"
    )


def _draw(
    scores: Mapping[str, Any], run: EvaluatedRun, benchmark: str | None, pictures: Path
) -> None:
    """Draw the reliability diagram and histogram of every kind of confidence, and the
    accuracy-coverage curves of all kinds.
    """
    kinds, name = scored_kinds(scores), benchmark or "overall"
    file = re.sub(r"[^\w.-]", "_", name)[:100]  # a name of a samples.jsonl may be anything
    for kind in kinds:
        values = summary_of(run, kind, benchmark)
        bins = bins_from_json(scores[kind]["bins"])
        note = "\n".join(
            f"{key.upper()} {values[key]:.3f}" for key in ("ece", "pce") if values[key] is not None
        )
        heading = f"{name}, {kind} confidence"
        diagrams.save(
            diagrams.reliability_diagram(bins, heading, note),
            pictures / f"reliability_{file}_{kind}",
        )
        diagrams.save(
            diagrams.confidence_histogram(bins, heading), pictures / f"confidence_{file}_{kind}"
        )
    curves = {
        kind: scores[kind]["curve"]
        for kind in kinds
        if scores[kind].get("curve", {}).get("coverage")
    }
    if curves:
        diagrams.save(diagrams.coverage_figure(curves, name), pictures / f"coverage_{file}")


def _draw_grids(benchmarks: Mapping[str, Mapping[str, Any]], pictures: Path) -> None:
    """Draw one picture per kind of confidence: all benchmarks side by side, on the same axes."""
    for kind in dict.fromkeys(
        kind for scores in benchmarks.values() for kind in scored_kinds(scores)
    ):
        bins = {
            name: bins_from_json(scores[kind]["bins"])
            for name, scores in benchmarks.items()
            if kind in scores
        }
        diagrams.save(diagrams.comparison_grid(bins), pictures / f"grid_{kind}")


def scored_kinds(scores: Mapping[str, Any]) -> list[str]:
    """Return the kinds of confidence that one benchmark's scores hold."""
    return [key for key, block in scores.items() if isinstance(block, Mapping) and "bins" in block]


def _sample(
    prompt: Prompt, response: Response, judgement: Judgement, keep_features: bool
) -> Sample:
    """Return a judged response with its measures, without its tokens."""
    logprobs = [float(value) for value in response.logprobs]
    reasoning_logprob = None
    if judgement.boundary is not None:
        reasoning_logprob = min(0.0, sum(logprobs[: judgement.boundary]))
    measures = Measures(
        token_confidence=geometric_mean_probability(logprobs),
        min_logprob=min(logprobs, default=None),
        mean_entropy=mean_entropy(response.top_logprobs),
        reasoning_logprob=reasoning_logprob,
        features=features(response.top_logprobs) if keep_features else None,
    )
    return Sample(
        prompt=codec.as_read(prompt),
        response=codec.as_read(response),
        judgement=judgement,
        measures=measures,
    )
