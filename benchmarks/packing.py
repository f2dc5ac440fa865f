"""How much of a step is padding, and how evenly it is spread over data-parallel ranks.

    python benchmarks/packing.py [--tokenizer DIR --solutions FILE.jsonl]

Lengths: the lengths of real worked solutions (column ``solution``) in the tokens of a real
tokenizer where both are given, and three synthetic distributions of response lengths under the
paper's limits (1024 + 3000 tokens, 512 responses per update). Counts tokens only; nothing is timed.
Columns: share of the computed token positions that is padding (``padding``), and how much longer
the busiest rank computes than the mean (``imbalance``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measurement import DATA, QUICK, Measurement

from megatron_dcpo.policy.batching import assign_to_ranks, collate, split_micro_batches
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample

RESPONSES, RANKS, MOST = (64, 8, 3000) if QUICK else (512, 8, 3000)
SETTINGS = {
    "padded, 8 per micro-batch": (False, 1, False, 1),
    "packed": (True, 1, False, 1),
    "packed, sequence parallel 8": (True, 8, False, 1),
    "packed, interleaved pipeline 4": (True, 1, True, 4),
}


def sample_of_length(length: int) -> TrainingSample:
    """Return a sample of ``length`` tokens, one of them the prompt's, that knows nothing else."""
    tokens = np.zeros(length - 1, np.int64)
    response = Response("p", 0, tokens, np.zeros(length - 1, np.float32), "stop", 0)
    judgement = Judgement("p", 0.0, None, "missing", length - 1, length - 1)
    return TrainingSample(Prompt("p", (), (0,), "", ""), response, judgement)


def synthetic(rng: np.random.Generator) -> dict[str, np.ndarray]:
    prompts = np.clip(rng.lognormal(5.0, 0.5, RESPONSES), 40, 1024).astype(int)
    responses = {
        "log-normal, median 800": rng.lognormal(np.log(800), 0.6, RESPONSES),
        "log-normal, median 300, long tail": rng.lognormal(np.log(300), 1.1, RESPONSES),
        "a third truncated at the limit": np.where(
            rng.random(RESPONSES) < 1 / 3, MOST, rng.lognormal(np.log(900), 0.5, RESPONSES)
        ),
    }
    return {
        name: prompts + np.clip(lengths, 1, MOST).astype(int) for name, lengths in responses.items()
    }


def real(tokenizer_dir: str, path: str, rng: np.random.Generator) -> np.ndarray:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    lengths = [
        len(tokenizer.encode(row["problem"]).ids)
        + min(MOST, len(tokenizer.encode(row["solution"]).ids))
        for row in rows
    ]
    return rng.choice(lengths, RESPONSES)


def measure(
    lengths: np.ndarray, packing: bool, multiple_of: int, uniform: bool, stages: int
) -> tuple[float, float]:
    shares = assign_to_ranks(lengths.tolist(), RANKS)
    of_rank = [[int(lengths[i]) for i in share] for share in shares]
    computed = []
    for rank, own in enumerate(of_rank):
        samples = [sample_of_length(length) for length in own]
        splits = split_micro_batches(
            of_rank, rank, micro_batch_size=8, max_tokens=16384, packing=packing, multiple_of=stages
        )
        batches = collate(
            samples, splits, packing=packing, multiple_of=multiple_of, uniform=uniform
        )
        computed.append(sum(batch.tokens.numel() for batch in batches))
    return float(1 - lengths.sum() / sum(computed)), float(max(computed) / np.mean(computed) - 1)


def measurements() -> Iterator[Measurement]:
    """Token positions computed per token that counts."""
    rng = np.random.default_rng(0)
    distributions, solutions = synthetic(rng), DATA / "math500" / "test.jsonl"
    if solutions.exists() and (DATA / "qwen_tokenizer").is_dir():
        distributions["MATH-500 solutions"] = real(
            str(DATA / "qwen_tokenizer"), str(solutions), rng
        )
    for name, lengths in distributions.items():
        packed, padded = (
            1 / (1 - measure(lengths, *SETTINGS[key])[0])
            for key in ("packed", "padded, 8 per micro-batch")
        )
        unit = "computed token positions per token"
        yield Measurement(
            f"packing/{name}", packed, padded, unit, "padded, 8 responses per micro-batch", goal=1.0
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer")
    parser.add_argument("--solutions")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    distributions = synthetic(rng)
    if args.tokenizer and args.solutions:
        distributions[f"solutions of {Path(args.solutions).parent.name}"] = real(
            args.tokenizer, args.solutions, rng
        )
    print(
        f"{RESPONSES} responses over {RANKS} data-parallel ranks, 16,384 tokens per packed "
        "micro-batch"
    )
    print(f"{'lengths':36} {'mean':>6}  {'layout':32} {'padding':>8} {'imbalance':>10}")
    for name, lengths in distributions.items():
        for layout, options in SETTINGS.items():
            padding, imbalance = measure(lengths, *options)
            print(f"{name:36} {lengths.mean():6.0f}  {layout:32} {padding:8.2%} {imbalance:10.2%}")


if __name__ == "__main__":
    main()
