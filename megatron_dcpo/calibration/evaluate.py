"""Accuracy and calibration of a model: sample, judge, score, write. The engine is a function, so this room knows none.

benchmarks --render--> prompts --generate--> responses --judge--> samples.jsonl --score--> evaluation.json, pictures
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.calibration.report import read_run, summary_of, write_report
from megatron_dcpo.calibration.samples import Sample, geometric_mean_probability, with_consistency, write_samples
from megatron_dcpo.calibration.scoring import bins_from_json
from megatron_dcpo.data import LoadedBenchmark, render_prompts
from megatron_dcpo.judging.blocks import find_marker
from megatron_dcpo.judging.confidence import MARKER, parse_confidence
from megatron_dcpo.judging.math import extract_boxed, verify_math
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.types import Prompt, Response

Generate = Callable[[Sequence[Prompt]], Sequence[Response]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Verdict:
    """What one response says and whether it is right."""

    answer: str | None
    correct: bool
    confidence: float | None
    status: str


Judge = Callable[[str, str, str], Verdict]  # (response text without EOS, ground truth, finish reason)


def judge_math(text: str, ground_truth: str, finish_reason: str, marker: str = MARKER) -> Verdict:
    """Judge a text exactly as training judges the sampled ids: the answer is read before the confidence line only."""
    content = text.encode(errors="surrogatepass")
    at = find_marker(content, marker.encode())
    reasoning = content[:at].decode(errors="replace")
    parsed = parse_confidence(text, marker=marker, finished=finish_reason == "stop")
    answer = extract_boxed(reasoning)
    return Verdict(answer, verify_math(reasoning, ground_truth), parsed.confidence, parsed.status)


def equivalent_math(a: str, b: str) -> bool:
    """Whether two boxed answers are the same number, set, expression ..."""
    return verify_math(f"\\boxed{{{a}}}", b)


def evaluate_benchmark(
    benchmark: LoadedBenchmark,
    tokenizer: Any,
    generate: Generate,
    eos_ids: Collection[int],
    *,
    judge: Judge = judge_math,
    equivalent: Callable[[str, str], bool] = equivalent_math,
    template: str = "paper",
    marker: str = MARKER,
    limit: int | None = None,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> list[Sample]:
    """Sample every problem of a benchmark and judge the responses, ``batch_size`` prompts per call of ``generate``.

    ``generate`` returns the repeats of every prompt in any order; they are matched by prompt id, never by position.
    ``eos_ids``: the tokens that end a response, which are no part of its text.
    """
    tokens = token_bytes(tokenizer)
    prompts = render_prompts(benchmark.records, tokenizer, template, limit=limit, marker=marker, source=benchmark.name)
    problems = {record.prompt_id: record.problem for record in benchmark.records}
    samples: list[Sample] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        truths = {prompt.prompt_id: prompt.ground_truth for prompt in batch}
        for response in generate(batch):
            text = decode_response(tokens, response, eos_ids)
            truth = truths[response.prompt_id]
            verdict = judge(text, truth, response.finish_reason)
            samples.append(_sample(benchmark.name, problems[response.prompt_id], text, truth, response, verdict))
        if progress is not None:
            progress(benchmark.name, min(start + batch_size, len(prompts)), len(prompts))
    order = {prompt.prompt_id: position for position, prompt in enumerate(prompts)}
    samples.sort(key=lambda sample: (order[sample.prompt_id], sample.repeat))
    return with_consistency(samples, equivalent)


def decode_response(tokens: TokenBytes, response: Response, eos_ids: Collection[int]) -> str:
    """The text of a response without its end token, byte by byte; special tokens stay, a marker may be one."""
    ids = response.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in eos_ids
    return b"".join(tokens.pieces(ids[: len(ids) - ended])).decode(errors="replace")


def rejudge(
    samples: Sequence[Sample],
    judge: Judge = judge_math,
    equivalent: Callable[[str, str], bool] = equivalent_math,
) -> list[Sample]:
    """The same responses judged anew, for instance by a better verifier."""
    judged = []
    for sample in samples:
        verdict = judge(sample.response, sample.ground_truth, sample.finish_reason)
        judged.append(Sample(**{**vars(sample), **vars(verdict)}))
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
        scores = evaluation["benchmarks"][benchmark] if benchmark else evaluation["overall"]
        for kind in (key for key, block in scores.items() if isinstance(block, Mapping) and "bins" in block):
            name, values = benchmark or "overall", summary_of(run, kind, benchmark)
            bins = bins_from_json(scores[kind]["bins"])
            note = "\n".join(f"{key.upper()} {values[key]:.3f}" for key in ("ece", "pce") if values[key] is not None)
            heading = f"{name}, {kind} confidence"
            diagrams.save(diagrams.reliability_diagram(bins, heading, note), pictures / f"reliability_{name}_{kind}")
            diagrams.save(diagrams.confidence_histogram(bins, heading), pictures / f"confidence_{name}_{kind}")
    write_report([run], root / "report.html", title or f"Evaluation of {evaluation['model'] or run.name}")


def _sample(benchmark: str, problem: str, text: str, truth: str, response: Response, verdict: Verdict) -> Sample:
    logprobs = [float(value) for value in response.logprobs]
    return Sample(
        benchmark=benchmark,
        prompt_id=response.prompt_id,
        repeat=response.sample_index,
        problem=problem,
        response=text,
        answer=verdict.answer,
        ground_truth=truth,
        correct=verdict.correct,
        confidence=verdict.confidence,
        status=verdict.status,
        token_confidence=geometric_mean_probability(logprobs),
        min_logprob=min(logprobs, default=None),
        num_tokens=len(logprobs),
        finish_reason=response.finish_reason,
    )
