"""Sampling, judging, scoring and writing, with an engine that answers from a script."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.cli import evaluate as cli
from megatron_dcpo.data.benchmarks import load_benchmark
from megatron_dcpo.data.datasets import PromptOptions, render_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import evaluate_benchmark, rejudge, respond_at_once
from megatron_dcpo.evaluation.results import write_evaluation
from megatron_dcpo.evaluation.samples import Sample, SampleLog, read_samples
from megatron_dcpo.evaluation.scoring import score_samples
from megatron_dcpo.judging.math.pool import equivalent_math
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.runtime import device
from megatron_dcpo.types import Prompt, Response
from tests.helpers.evaluated import changed, rows_of

EOS = 0
TEXTS = (
    "Two and two.\n\\boxed{4}\n<conf> Confidence: 0.90",
    "\\boxed{8/2}\n<conf> 0.6",
    "\\boxed{5}\n<conf> Confidence: 0.7",
    "I think \\boxed{4}",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer: every byte is a token, id 0 ends a response."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS} | {character: i for i, character in enumerate(alphabet, start=1)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def scripted(tokenizer: Any, truncated: bool = False) -> Any:
    """An engine that gives ``TEXTS`` to every prompt, the repeats in reverse order, four at
    a time.
    """

    def stream(samples: Sequence[tuple[Prompt, int]]) -> Iterator[list[Response]]:
        responses = []
        for prompt, index in reversed(samples):
            ids = np.array(
                tokenizer.encode(TEXTS[index]) + ([] if truncated else [EOS]), dtype=np.int64
            )
            logprobs = np.full(len(ids), np.log(0.5), dtype=np.float32)
            reason = "length" if truncated else "stop"
            responses.append(Response(prompt.prompt_id, index, ids, logprobs, reason, 0))  # type: ignore[arg-type]
        yield from (responses[start : start + 4] for start in range(0, len(responses), 4))

    return stream


@pytest.fixture
def benchmark_file(tmp_path: Path) -> Path:
    rows = [{"problem": "What is 2+2?", "answer": "4"}, {"problem": "What is 2+3?", "answer": "5"}]
    path = tmp_path / "toy.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def evaluated(
    tokenizer: Any, path: Path, truncated: bool = False, limit: int | None = None, **options: Any
) -> list[Sample]:
    """The toy benchmark through an engine of this process."""
    loaded = load_benchmark(f"toy={path}")
    prompts = render_prompts(loaded.records, tokenizer, PromptOptions("raw", limit=limit))
    complete = respond_at_once(scripted(tokenizer, truncated), token_bytes(tokenizer), [EOS])
    return evaluate_benchmark(prompts, complete, repeats=len(TEXTS), **options)


def test_samples_hold_what_was_said(tokenizer: Any, benchmark_file: Path) -> None:
    steps = []
    samples = evaluated(
        tokenizer,
        benchmark_file,
        progress=lambda name, done, total: steps.append((name, done, total)),
    )
    assert steps == [("toy", 0, 8), ("toy", 4, 8), ("toy", 8, 8)]
    assert [(s.prompt.prompt_id, s.response.sample_index) for s in samples] == [
        (f"toy/{i}", r) for i in range(2) for r in range(4)
    ]
    first = samples[:4]
    assert [s.response.text for s in first] == list(TEXTS)
    assert [s.judgement.answer for s in first] == ["4", "8/2", "5", "4"]
    assert [s.correct for s in first] == [True, True, False, True]
    assert [s.judgement.confidence for s in first] == [0.9, 0.6, 0.7, None]
    assert [s.judgement.status for s in first] == ["ok", "ok", "ok", "missing"]
    assert [s.measures.consistency_confidence for s in first] == [
        0.75,
        0.75,
        0.25,
        0.75,
    ]  # 8/2 is 4
    assert [s.correct for s in samples[4:]] == [False, False, True, False]
    assert first[0].prompt.problem == "What is 2+2?"
    assert first[0].measures.token_confidence == pytest.approx(0.5)
    assert first[0].judgement.length == len(TEXTS[0]) + 1
    assert rows_of(rejudge(samples)) == rows_of(samples)


def test_truncated_responses_have_no_confidence(tokenizer: Any, benchmark_file: Path) -> None:
    samples = evaluated(tokenizer, benchmark_file, truncated=True, limit=1)
    assert {s.judgement.status for s in samples} == {"truncated"}
    assert [s.correct for s in samples] == [True, True, False, True]
    assert samples[0].response.text == TEXTS[0]


def test_equivalence_is_mathematical() -> None:
    assert equivalent_math("1/2", "\\frac{1}{2}")
    assert not equivalent_math("1/2", "1/3")


@pytest.mark.draws
@pytest.mark.slow
def test_an_evaluation_leaves_its_files(
    tokenizer: Any, benchmark_file: Path, tmp_path: Path
) -> None:
    samples = evaluated(tokenizer, benchmark_file)
    evaluation = score_samples(samples, model="m", resamples=20)
    write_evaluation(tmp_path / "run", evaluation, samples)
    written = {path.name for path in (tmp_path / "run").rglob("*")}
    assert {
        "evaluation.json",
        "samples.jsonl",
        "report.html",
        "reliability_toy_verbal.png",
    } <= written
    assert {"coverage_toy.png", "coverage_toy.svg"} <= written
    assert not any(name.startswith("grid") for name in written)  # one benchmark needs no grid
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text()) == evaluation
    assert rows_of(read_samples(tmp_path / "run" / "samples.jsonl")) == rows_of(samples)
    toy = evaluation["benchmarks"]["toy"]
    assert toy["accuracy"] == 0.5
    assert toy["parse_rate"] == toy["verbal"]["parse_rate"] == 0.75
    assert toy["violation_rate"] == toy["violations"]["missing"] == 0.25
    assert {"ece", "pce", "brier", "auroc", "mean", "parse_rate"} <= set(toy["verbal"])
    assert {"accuracy", "verbal", "token", "consistency"} <= set(toy["ci95"])
    assert "toy" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.draws
@pytest.mark.slow
def test_several_benchmarks_have_a_grid(
    tokenizer: Any, benchmark_file: Path, tmp_path: Path
) -> None:
    samples = evaluated(tokenizer, benchmark_file)
    samples += [changed(sample, task="other") for sample in samples]
    write_evaluation(
        tmp_path, score_samples(samples, ["verbal", "token_min"], resamples=0), samples
    )
    written = {path.name for path in tmp_path.rglob("*")}
    assert {
        "grid_verbal.png",
        "grid_token_min.svg",
        "coverage_overall.png",
        "coverage_other.png",
    } <= written


def test_token_kinds_are_functions_of_the_same_samples(
    tokenizer: Any, benchmark_file: Path
) -> None:
    samples = evaluated(tokenizer, benchmark_file)
    kinds = ["token", "token_product", "token_min", "token_mean_logprob"]
    toy = score_samples(samples, kinds, resamples=0)["benchmarks"]["toy"]
    lengths = [len(text) + 1 for text in TEXTS]
    assert toy["token"]["mean"] == pytest.approx(0.5)
    assert toy["token_product"]["mean"] == pytest.approx(
        np.mean([0.5**n for n in lengths]), rel=1e-5
    )
    assert toy["token_min"]["mean"] == pytest.approx(0.5)
    assert toy["token_mean_logprob"]["ece"] is None
    assert toy["token_mean_logprob"]["auroc"] == toy["token"]["auroc"] == 0.5


def arguments(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["evaluate", *args])


@pytest.mark.slow
def test_command_line_samples_and_scores_again(
    tokenizer: Any,
    benchmark_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A new evaluation and the re-scoring of its samples.jsonl give the same evaluation.json."""
    stream = scripted(tokenizer)
    engine = SimpleNamespace(stream=lambda samples, sampling: stream(samples), eos_token_ids=(EOS,))
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.local_model.check_sampled_model", lambda path: 1000
    )
    monkeypatch.setattr("megatron_dcpo.evaluation.local_model.check_vocabulary", lambda *args: None)
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.local_model.build_local_engine", lambda *args: engine
    )
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.local_model.load_tokenizer", lambda path: tokenizer
    )
    out = tmp_path / "new"
    args = arguments(
        "--model",
        "m",
        "--benchmarks",
        f"toy={benchmark_file}",
        "--out",
        str(out),
        "--template",
        "raw",
        "--json",
    )
    assert args.run(args) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["sampled"]["template"] == "raw"
    for extra in ([], ["--rejudge"]):
        args = arguments(
            "--samples", str(out / "samples.jsonl"), "--out", str(tmp_path / "again"), *extra
        )
        assert args.run(args) == 0
        assert json.loads((tmp_path / "again" / "evaluation.json").read_text()) == printed
    assert "toy verbal" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", [False, True])
def test_on_a_gpu_vllm_samples_many_at_once_in_bf16(
    gpu: bool, tokenizer: Any, benchmark_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, asked = scripted(tokenizer), []
    engine = SimpleNamespace(stream=lambda samples, sampling: stream(samples), eos_token_ids=(EOS,))
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.local_model.check_sampled_model", lambda path: 1000
    )
    monkeypatch.setattr("megatron_dcpo.evaluation.local_model.check_vocabulary", lambda *args: None)
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.local_model.build_local_engine",
        lambda *args: asked.append(args[2]) or engine,
    )
    monkeypatch.setattr(
        "megatron_dcpo.evaluation.local_model.load_tokenizer", lambda path: tokenizer
    )
    monkeypatch.setattr("megatron_dcpo.evaluation.local_model.choose_engine", lambda *_: "vllm")
    monkeypatch.setattr(device, "_CPU", device._GPU if gpu else device._CPU)
    common = (
        "--model",
        "m",
        "--benchmarks",
        f"toy={benchmark_file}",
        "--out",
        str(tmp_path),
        "--template",
        "raw",
    )
    for options in ((), ("--dtype", "float32", "--batch-size", "7", "--fresh")):
        args = arguments(*common, *options)
        assert args.run(args) == 0
    found = [
        (options.dtype, options.max_num_seqs, options.gpu_memory_utilization, options.sleep)
        for options in asked
    ]
    chosen = ("bfloat16", 512, 0.9, False) if gpu else ("float32", 64, 0.6, False)
    assert found == [chosen, ("float32", 7, *chosen[2:])]


def test_all_requests_are_one_submission(tokenizer: Any, benchmark_file: Path) -> None:
    loaded, submitted = load_benchmark(f"toy={benchmark_file}"), []
    stream = scripted(tokenizer)
    complete = respond_at_once(
        lambda s: submitted.append(len(s)) or stream(s), token_bytes(tokenizer), [EOS]
    )
    prompts = render_prompts(loaded.records, tokenizer, PromptOptions("raw"))
    evaluate_benchmark(prompts, complete, repeats=4)
    assert submitted == [8]


def test_what_was_judged_is_kept_where_the_engine_fails(
    tokenizer: Any, benchmark_file: Path, tmp_path: Path
) -> None:
    def stream(samples: Sequence[tuple[Prompt, int]]) -> Iterator[list[Response]]:
        yield next(iter(scripted(tokenizer)(samples)))
        raise RuntimeError("the engine failed")

    loaded = load_benchmark(f"toy={benchmark_file}")
    prompts = render_prompts(loaded.records, tokenizer, PromptOptions("raw"))
    complete = respond_at_once(stream, token_bytes(tokenizer), [EOS])
    with SampleLog(tmp_path, {}) as log, pytest.raises(RuntimeError, match="the engine failed"):
        evaluate_benchmark(prompts, complete, repeats=4, log=log)
    kept = [
        (s.prompt.prompt_id, s.response.sample_index)
        for s in read_samples(tmp_path / "samples.jsonl")
    ]
    assert kept == [("toy/1", 3), ("toy/1", 2), ("toy/1", 1), ("toy/1", 0)]


def test_only_a_model_is_sampled_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = arguments(
        "--endpoint", "http://localhost:1", "--benchmarks", "math500", "--out", str(tmp_path)
    )
    with pytest.raises(UserError, match="2 processes were started, but only --model"):
        args.run(args)


def test_command_line_errors(tmp_path: Path, benchmark_file: Path) -> None:
    toy = f"toy={benchmark_file}"
    for options, message in (
        (["--model", "m"], "--benchmarks is missing"),
        (["--model", str(tmp_path), "--benchmarks", toy], r"config\.json is missing"),
        (["--model", "m", "--benchmarks", "mathx"], "unknown benchmark 'mathx'"),
        (["--model", "m", "--benchmarks", toy, "--template", "x"], "unknown prompt template"),
        (["--model", "m", "--benchmarks", toy, "--confidence", "x"], "unknown confidence 'x'"),
        (["--samples", str(tmp_path / "none.jsonl")], "no such file"),
    ):
        args = arguments(*options, "--out", str(tmp_path / "out"))
        with pytest.raises(UserError, match=message):
            args.run(args)
    args = arguments("--out", "x")
    with pytest.raises(UserError, match="--model, --endpoint and --samples"):
        args.run(args)
