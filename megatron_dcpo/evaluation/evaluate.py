"""Accuracy and calibration of a model: sample, judge, score, write. The engine is a function, so this room knows none.

benchmarks --render--> prompts --complete--> completions --judge--> samples.jsonl --score--> evaluation.json, pictures
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.data import LoadedBenchmark
from megatron_dcpo.evaluation.judges import Equivalent, Judge, Verdict, equivalent_math, judge_math
from megatron_dcpo.evaluation.posthoc import features
from megatron_dcpo.evaluation.report import Run, read_run, summary_of, write_report
from megatron_dcpo.evaluation.samples import (
    Journal,
    Sample,
    geometric_mean_probability,
    mean_entropy,
    with_consistency,
    write_samples,
)
from megatron_dcpo.evaluation.scoring import bins_from_json
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.types import Completion, Prompt, Response

Generate = Callable[[Sequence[Prompt]], Sequence[Response]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """A problem and which of its repeats are still to be sampled."""

    prompt: Prompt
    repeats: tuple[int, ...]


Complete = Callable[[Sequence[Request]], Iterable[Sequence[Completion]]]  # in any order, a few at a time


def evaluate_benchmark(
    benchmark: LoadedBenchmark,
    prompts: Sequence[Prompt],
    complete: Complete,
    *,
    repeats: int,
    judge: Judge = judge_math,
    equivalent: Equivalent = equivalent_math,
    journal: Journal | None = None,
    keep_features: bool = False,
    progress: Progress | None = None,
) -> list[Sample]:
    """Sample every prompt of a benchmark ``repeats`` times and judge the completions as they come.

    Completions are matched by prompt id and repeat, never by position, so that the samples do not depend on the order
    in which an engine finishes. What ``journal`` holds already is not asked for; what is new is written to it at once.
    """
    problems = {record.prompt_id: record.problem for record in benchmark.records}
    truths = {prompt.prompt_id: prompt.ground_truth for prompt in prompts}
    wanted = {(prompt.prompt_id, repeat) for prompt in prompts for repeat in range(repeats)}
    found = {
        key: sample for key, sample in (journal.finished(benchmark.name) if journal else {}).items() if key in wanted
    }
    missing = [(p, tuple(r for r in range(repeats) if (p.prompt_id, r) not in found)) for p in prompts]
    requests = [Request(prompt, left) for prompt, left in missing if left]
    if progress is not None:
        progress(benchmark.name, len(found), len(wanted))
    for completions in complete(requests) if requests else ():
        verdicts = judge([(c.text, truths[c.prompt_id], c.finish_reason) for c in completions])
        for completion, verdict in zip(completions, verdicts, strict=True):
            name = completion.prompt_id
            sample = _sample(benchmark.name, problems[name], truths[name], completion, verdict, keep_features)
            found[name, completion.repeat] = sample
            if journal is not None:
                journal.add(sample)
        if progress is not None:
            progress(benchmark.name, len(found), len(wanted))
    order = {prompt.prompt_id: position for position, prompt in enumerate(prompts)}
    samples = sorted(found.values(), key=lambda sample: (order[sample.prompt_id], sample.repeat))
    return with_consistency(samples, equivalent)


def complete_in_batches(
    generate: Generate, tokens: TokenBytes, eos_ids: Collection[int], batch_size: int = 64
) -> Complete:
    """An engine in this process as ``Complete``: ``batch_size`` prompts per call of ``generate``.

    ``generate`` returns all repeats of every prompt; ``eos_ids``: the tokens that end a response, no part of its text.
    """

    def complete(requests: Sequence[Request]) -> Iterator[list[Completion]]:
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            asked = {request.prompt.prompt_id: request.repeats for request in batch}
            yield [
                Completion(
                    response.prompt_id,
                    response.sample_index,
                    decode_response(tokens, response, eos_ids),
                    response.finish_reason,
                    response.logprobs,
                    response.top_logprobs,
                )
                for response in generate([request.prompt for request in batch])
                if response.sample_index in asked[response.prompt_id]
            ]

    return complete


def decode_response(tokens: TokenBytes, response: Response, eos_ids: Collection[int]) -> str:
    """The text of a response without its end token, byte by byte; special tokens stay, a marker may be one."""
    ids = response.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in eos_ids
    return b"".join(tokens.pieces(ids[: len(ids) - ended])).decode(errors="replace")


def rejudge(
    samples: Sequence[Sample],
    judge: Judge = judge_math,
    equivalent: Equivalent = equivalent_math,
) -> list[Sample]:
    """The same responses judged anew, for instance by a better verifier."""
    verdicts = judge([(sample.response, sample.ground_truth, sample.finish_reason) for sample in samples])
    judged = [replace(sample, **vars(verdict)) for sample, verdict in zip(samples, verdicts, strict=True)]
    return with_consistency(judged, equivalent)


def write_evaluation(
    directory: str | Path, evaluation: Mapping[str, Any], samples: Sequence[Sample], title: str = ""
) -> None:
    """``evaluation.json``, ``samples.jsonl``, ``report.html``, and ``diagrams/`` per benchmark and kind of confidence."""
    root = Path(directory)
    pictures = root / "diagrams"
    root.mkdir(parents=True, exist_ok=True)
    write_samples(samples, root / "samples.jsonl")
    text = json.dumps(evaluation, indent=1, allow_nan=False, ensure_ascii=False)
    (root / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    run = read_run(root)
    names: list[str | None] = [*evaluation["benchmarks"]]
    for benchmark in names if len(names) == 1 else [None, *names]:
        _draw(evaluation["benchmarks"][benchmark] if benchmark else evaluation["overall"], run, benchmark, pictures)
    if len(names) > 1:
        _draw_grids(evaluation["benchmarks"], pictures)
    write_report([run], root / "report.html", title or f"Evaluation of {evaluation['model'] or run.name}")


def _draw(scores: Mapping[str, Any], run: Run, benchmark: str | None, pictures: Path) -> None:
    """Reliability diagram and histogram of every kind of confidence, and the accuracy-coverage curves of all kinds."""
    kinds, name = scored_kinds(scores), benchmark or "overall"
    for kind in kinds:
        values = summary_of(run, kind, benchmark)
        bins = bins_from_json(scores[kind]["bins"])
        note = "\n".join(f"{key.upper()} {values[key]:.3f}" for key in ("ece", "pce") if values[key] is not None)
        heading = f"{name}, {kind} confidence"
        diagrams.save(diagrams.reliability_diagram(bins, heading, note), pictures / f"reliability_{name}_{kind}")
        diagrams.save(diagrams.confidence_histogram(bins, heading), pictures / f"confidence_{name}_{kind}")
    curves = {kind: scores[kind]["curve"] for kind in kinds if scores[kind].get("curve", {}).get("coverage")}
    if curves:
        diagrams.save(diagrams.coverage_figure(curves, name), pictures / f"coverage_{name}")


def _draw_grids(benchmarks: Mapping[str, Mapping[str, Any]], pictures: Path) -> None:
    """One picture per kind of confidence: all benchmarks side by side, on the same axes."""
    for kind in dict.fromkeys(kind for scores in benchmarks.values() for kind in scored_kinds(scores)):
        bins = {name: bins_from_json(scores[kind]["bins"]) for name, scores in benchmarks.items() if kind in scores}
        diagrams.save(diagrams.comparison_grid(bins), pictures / f"grid_{kind}")


def scored_kinds(scores: Mapping[str, Any]) -> list[str]:
    """The kinds of confidence that one benchmark's scores hold."""
    return [key for key, block in scores.items() if isinstance(block, Mapping) and "bins" in block]


def _sample(
    benchmark: str, problem: str, truth: str, completion: Completion, verdict: Verdict, keep_features: bool
) -> Sample:
    logprobs = [float(value) for value in completion.logprobs]
    return Sample(
        benchmark=benchmark,
        prompt_id=completion.prompt_id,
        repeat=completion.repeat,
        problem=problem,
        response=completion.text,
        answer=verdict.answer,
        ground_truth=truth,
        correct=verdict.correct,
        confidence=verdict.confidence,
        status=verdict.status,
        token_confidence=geometric_mean_probability(logprobs),
        min_logprob=min(logprobs, default=None),
        num_tokens=len(logprobs),
        finish_reason=completion.finish_reason,
        mean_entropy=mean_entropy(completion.top_logprobs),
        features=features(completion.top_logprobs) if keep_features else None,
        category=verdict.category,
    )
