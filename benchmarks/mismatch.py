"""Engine against trainer in bf16, with logits in the model's type and in fp32
(``model.head_dtype``).

    python benchmarks/mismatch.py [--engine transformers|vllm] [--megatron apply_rope_fusion=false]
    [--tokens 32] [--quantization fp8_per_channel]

A random Qwen3 with 151,936 tokens whose sampled tokens have logits of about 18, as a trained
model's: there numbers of bf16 are 0.125 apart. What is measured is ``engine/logprob_diff_mean`` of
one step, by all parts of a training run. On a GPU the same with vLLM, Transformer Engine, and its
rotary kernel fused or not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measurement import QUICK, Measurement, environment

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 151936,
}
LOGIT = 18.0  # of a sampled token: the square of the logits' standard deviation
PROMPTS, GROUP = 8, 8


def measurements() -> Iterator[Measurement]:
    found = {}
    for head in ("model", "fp32"):
        command = [sys.executable, __file__, "--head", head]
        if QUICK:
            command += ["--tokens", "2", "--vocabulary", "2048"]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=True
        )
        found[head] = json.loads(done.stdout.splitlines()[-1])
    after, before = (found[head]["engine/logprob_diff_mean"] for head in ("fp32", "model"))
    yield Measurement(
        "mismatch/logits in fp32, vocabulary 151,936",
        after,
        before,
        "mean |engine - trainer| of a sampled token's log-prob (bf16, CPU)",
        "logits in bf16",
        0.8,
        raw=found,
    )


def write_policy(path: Path, vocabulary: int) -> Path:
    """Write the random policy, with the quickstart's tokenizer."""
    import policies
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **SHAPE | {"vocab_size": vocabulary},
            tie_word_embeddings=False,
            eos_token_id=policies.EOS,
            pad_token_id=281,
        )
    )
    with torch.no_grad():  # the last norm makes hidden states of mean square 1
        model.lm_head.weight.normal_(std=(LOGIT / SHAPE["hidden_size"]) ** 0.5)
    model.bfloat16().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(policies.QUICKSTART / "policy" / name, path / name)
    return path


def measure(
    head: str,
    engine: str,
    tokens: int,
    megatron: Sequence[str],
    vocabulary: int = SHAPE["vocab_size"],
    quantization: str = "",
) -> dict[str, Any]:
    """Return the mismatch metrics of one step."""
    import policies

    from megatron_dcpo.training.mismatch import LARGEST, mismatch_metrics

    with tempfile.TemporaryDirectory() as scratch:
        model = write_policy(Path(scratch, "model"), vocabulary)
        options = [
            "model.params_dtype=bf16",
            f"model.head_dtype={head}",
            f"rollout.engine={engine}",
        ]
        options += [f"parallel.megatron.{option}" for option in megatron]
        if quantization:
            options += [f"rollout.vllm.quantization={quantization}", "objective.tis_level=token"]
        options = policies.overrides(model, Path(scratch, "run"), PROMPTS, GROUP, tokens, *options)
        with policies.training_run(options) as run:
            samples = policies.sampled(run, 1)
            run.engine.sleep()
            statistics = policies.update(run, samples, 1)
    found = mismatch_metrics(statistics.sums)
    return {
        "head": head,
        "engine": engine,
        "quantization": quantization,
        "tokens": int(statistics.sums["engine/tokens"]),
        **found,
    } | {LARGEST: statistics.maxima[LARGEST]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--head", choices=("model", "fp32"), help="one of them only")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--megatron", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--quantization", default="", help="the engine's (rollout.vllm)")
    args = parser.parse_args()
    for head in [args.head] if args.head else ["model", "fp32"]:
        found = measure(
            head=head,
            engine=args.engine,
            tokens=args.tokens,
            megatron=args.megatron,
            vocabulary=args.vocabulary,
            quantization=args.quantization,
        )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
