"""Random Qwen3 policies for measurements, with the quickstart's tokenizer, and a training run on
one of them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurement import REPOSITORY, cpu_seconds

QUICKSTART = REPOSITORY / "examples" / "quickstart"
EOS = 280
SHAPES: dict[str, dict[str, int]] = {
    "131k": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 282,
    },
    # 26 of 28 million parameters in layers
    "28M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "105M": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    # 24 of 28 million parameters in the vocabulary
    "28M, large vocabulary": {
        "hidden_size": 160,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 151936,
    },
}


def write_policy(
    path: Path, shape: dict[str, int] | str, stop: float = 0.0, dtype: str = "float32"
) -> Path:
    """A random policy that ends a response with probability ``stop`` at every token: lengths are
    geometric, or all the longest. Every hidden state has one large equal component that no layer
    reads or writes, but the end's row of the tied output does.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **sizes,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            eos_token_id=EOS,
            pad_token_id=281,
        )
    )
    with torch.no_grad():
        rows, vocabulary = model.get_input_embeddings().weight, sizes["vocab_size"]
        rows[:, 0] = 1.0
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0.0
            elif name.endswith("_proj.weight"):
                weight[:, 0] = 0.0
        constant = (
            model.model(torch.randint(282, vocabulary + 282, (4, 32)) % vocabulary)
            .last_hidden_state[..., 0]
            .mean()
        )
        rows[EOS, 0] += (math.log(stop * vocabulary / (1 - stop)) if stop else -100.0) / constant
    model.to(getattr(torch, dtype)).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(QUICKSTART / "policy" / name, path / name)
    return path


def overrides(
    model: Path, run_dir: Path, prompts: int, group: int, tokens: int, *more: str
) -> list[str]:
    """Options of a training on ``model``: GRPO, no probe, nothing logged or saved."""
    return [
        f"run_dir={run_dir}",
        f"model.path={model}",
        f"data.path={QUICKSTART}/data/train.jsonl",
        f"data.prompts_per_step={prompts}",
        f"rollout.group_size={group}",
        f"rollout.max_response_length={tokens}",
        "data.max_prompt_length=16",
        "objective.name=grpo",
        "training.steps=1000",
        "training.save_interval=0",
        "logging.to=[]",
        "optimizer.lr=1e-6",
        *more,
    ]


@contextmanager
def training_run(options: list[str], file: str = "grpo.yaml") -> Iterator[Any]:
    """All parts of a training in this process, its engine synchronized."""
    from megatron_dcpo.config import load_config
    from megatron_dcpo.training.run import build

    with build(load_config(str(QUICKSTART / file), options)) as run:
        run.weight_sync.push(version=0)
        yield run


def half_right(samples: list[Any]) -> list[Any]:
    """The samples with half of each group judged right: nothing that a random policy writes is, and
    a group without a reasoning gradient is not computed.
    """
    ordered = sorted(samples, key=lambda sample: sample.response.key)
    return [
        replace(sample, judgement=replace(sample.judgement, correct=float(number % 2)))
        for number, sample in enumerate(ordered)
    ]


def sampled(run: Any, step: int) -> list[Any]:
    """The responses of a step, half of each group right."""
    return half_right(run.rollouts.take(step).samples)


def update(run: Any, samples: list[Any], step: int) -> Any:
    """Take the optimizer steps of a training step on its samples; their statistics."""
    scores = run.updater.method.group_scores(samples)
    return run.updater.update(samples, scores, step)[1]


def training_step(run: Any, step: int) -> dict[str, float]:
    """One step as the loop takes it, with half of each group right; wall seconds of its parts,
    ``train_cpu``, its response tokens and those that were trained on. It has a gradient.
    """
    run.timers.clear()
    samples = sampled(run, step)
    cpu = cpu_seconds()
    with run.timers("train"):
        run.engine.sleep()
        run.offload.reload()
        statistics = update(run, samples, step)
    cpu = cpu_seconds() - cpu
    with run.timers("reshard"):
        run.offload.offload()
        run.weight_sync.push(version=step)
    tokens = sum(len(sample.response_ids) for sample in samples)
    trained = sum(len(sample.response_ids) for sample in statistics.trained)
    grad_norm = statistics.grad_norms[-1]
    assert grad_norm > 0, "a step that trains nothing"
    assert trained == tokens, "a step that leaves out responses"
    return {
        **run.timers.seconds,
        "train_cpu": cpu,
        "tokens": tokens,
        "trained_tokens": trained,
        "grad_norm": grad_norm,
    }


def problems(count: int) -> list[str]:
    """The first prompts of the quickstart's training data."""
    return [
        json.loads(x)["problem"]
        for x in (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:count]
    ]
