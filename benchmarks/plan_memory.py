"""What ``dcpo plan`` predicts against what a rank really holds, on the CPU: ``python benchmarks/plan_memory.py``.

Random checkpoints of 8 layers, hidden 512, vocabulary 8,000; micro-batches of about a thousand tokens. Prints predicted and
measured bytes and their ratio; exact for weights, gradients and optimizer state, within 10 % for saved activations.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.distributed.launch import torchrun

WORKER = Path(__file__).parents[1] / "tests" / "distributed" / "plan_worker.py"
LAYOUTS = {
    "one process": (1, {}),
    "TP 2": (2, {"tensor_model_parallel_size": 2}),
    "TP 2, sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


def make_checkpoint(path: Path, family: str) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, model = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[family]
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


def main() -> None:
    settings = [
        {"dtype": dtype, "parallel": {"recompute_granularity": recompute, "sequence_packing": packing}}
        for dtype in ("bf16", "fp32")
        for recompute in ("none", "selective", "full")
        for packing in (True, False)
    ]
    print(f"{'model':6} {'layout':24} {'dtype':5} {'recompute':10} {'packed':6} {'what':12}", end=" ")
    print(f"{'predicted':>13} {'measured':>13} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as scratch:
        for family in ("qwen3", "llama"):
            checkpoint = make_checkpoint(Path(scratch, family), family)
            for name, (processes, parallel) in LAYOUTS.items():
                options = {
                    "model": str(checkpoint),
                    "parallel": parallel,
                    "settings": settings,
                    "prompt_tokens": 56,
                    "response_tokens": 456,
                    "samples": 2,
                    "activations": True,
                }
                for setting, result in zip(
                    settings, torchrun(WORKER, processes, Path(scratch, "out"), options)[0], strict=True
                ):
                    rows = {what: (result["predicted"][what], n) for what, n in result["measured"].items()}
                    rows["activations"] = (result["activations"]["predicted"], result["activations"]["measured"])
                    for what, (predicted, measured) in rows.items():
                        kind = setting["parallel"]
                        ratio = f"{predicted / measured:7.4f}" if measured else "      -"
                        print(
                            f"{family:6} {name:24} {setting['dtype']:5} {kind['recompute_granularity']:10} "
                            f"{kind['sequence_packing']!s:6} {what:12} {predicted:13,} {measured:13,} {ratio}"
                        )


if __name__ == "__main__":
    main()
