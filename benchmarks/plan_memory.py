"""What ``dcpo plan`` predicts against what a rank really holds, on the CPU: ``python
benchmarks/plan_memory.py``.

Random checkpoints of 4 layers, hidden 512, vocabulary 8,000; micro-batches of 2,048 tokens. Prints
predicted and measured bytes and their ratio for every rank: exact for weights, gradients and
optimizer state; ``activations`` are the tensors kept when the first backward pass begins, ``peak``
the most that torch's allocator had given out in a forward-backward. A plan is of the fullest rank
of a pipeline stage, and so is the peak that it is compared with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import QUICK, Measurement, torchrun

PP2 = {"pipeline_model_parallel_size": 2}
RUNS = (
    ("qwen3", "one process", 1, {}),
    ("llama", "one process", 1, {}),
    ("qwen3", "TP 2", 2, {"tensor_model_parallel_size": 2}),
    (
        "qwen3",
        "TP 2, sequence parallel",
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    ("qwen3", "PP 2", 2, PP2),
    ("qwen3", "PP 2, virtual 2", 2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
)
SETTINGS = (
    ("bf16", "none", True),
    ("bf16", "none", False),
    ("bf16", "selective", True),
    ("bf16", "full", True),
    ("fp32", "none", True),
    ("fp32", "full", True),
)
if QUICK:
    RUNS, SETTINGS = RUNS[:1], SETTINGS[:1]


def make_checkpoint(path: Path, family: str) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    model(
        config(
            vocab_size=8000,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            eos_token_id=0,
        )
    ).save_pretrained(path)
    return path


def ranks_of(processes: int, out: Path, options: dict[str, Any]) -> list[Any]:
    """What ``rank_memory.py`` measures in every rank of a torchrun."""
    out.mkdir(parents=True, exist_ok=True)
    torchrun(
        processes,
        str(Path(__file__).with_name("rank_memory.py")),
        json.dumps(options | {"out": str(out)}),
    )
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)]


def results() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of every rank and setting: its name, bytes predicted and measured."""
    settings = [
        {
            "dtype": dtype,
            "parallel": {"recompute_granularity": recompute, "sequence_packing": packing},
        }
        for dtype, recompute, packing in SETTINGS
    ]
    lengths = {
        "prompt_tokens": 88,
        "response_tokens": 936,
        "samples": 2,
        "activations": True,
        "peak": True,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for family, name, processes, parallel in RUNS:
            checkpoint = Path(scratch, family)
            if not checkpoint.exists():
                make_checkpoint(checkpoint, family)
            options = {
                "model": str(checkpoint),
                "parallel": parallel,
                "settings": settings,
            } | lengths
            for rank, of_rank in enumerate(ranks_of(processes, Path(scratch, "out"), options)):
                for (dtype, recompute, packing), result in zip(SETTINGS, of_rank, strict=True):
                    how = f"{dtype}, recompute {recompute}, {'packed' if packing else 'padded'}"
                    yield f"{family}, {name}, rank {rank}, {how}", result


def measurements() -> Iterator[Measurement]:
    """The worst of all ranks and settings: state must be predicted to the byte, peaks
    within 5 %.
    """
    found = list(results())
    state = [
        (
            sum(result["predicted"][k] for k in ("weights", "gradients", "main_params", "moments")),
            sum(result["measured"].values()),
            name,
        )
        for name, result in found
    ]
    peaks = fullest(found)
    for what, rows, least, most in (("state", state, 1.0, 1.0), ("peak", peaks, 0.95, 1.05)):
        ratios = {name: round(predicted / measured, 4) for predicted, measured, name in rows}
        for bound, how, goal in ((max, "largest", most), (min, "smallest", least)):
            predicted, measured, name = bound(rows, key=lambda row: row[0] / row[1])
            fields = {
                "at_least": how == "smallest",
                "goal": goal,
                "reason": name,
                "raw": ratios if bound is max else {},
            }
            label = f"plan_memory/{what}, {how} ratio"
            yield Measurement(
                label, predicted, measured, "bytes predicted by dcpo plan", "bytes held", **fields
            )


def fullest(found: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, int, str]]:
    """The peaks predicted and measured, for ranks of one stage that of the fullest one: tensor
    parallel ranks have different parts of the vocabulary's padding.
    """
    peaks: dict[tuple[str, str, str], tuple[int, int, str]] = {}
    for name, result in found:
        run, how = name.split(", rank ", 1)
        predicted, measured = result["peak"]["predicted"], result["peak"]["measured"]
        stage = run if "PP" not in run else how[0]
        key = (run, how[3:], stage)
        if key not in peaks or measured > peaks[key][1]:
            peaks[key] = (predicted, measured, name)
    return list(peaks.values())


def main() -> None:
    for name, result in results():
        print(name)
        show(result)


def show(result: dict) -> None:
    rows = {what: (result["predicted"][what], held) for what, held in result["measured"].items()}
    for what in ("activations", "peak"):
        rows[what] = (result[what]["predicted"], result[what]["measured"])
    for what, (predicted, measured) in rows.items():
        ratio = f"{predicted / measured:7.4f}" if measured else "      -"
        print(f"    {what:12} {predicted:13,} {measured:13,} {ratio}", flush=True)


if __name__ == "__main__":
    main()
