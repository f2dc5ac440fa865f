"""Write random weights in the shape of a public model, with the quickstart's tokenizer.

    python benchmarks/random_model.py Qwen/Qwen3-1.7B OUT [--pretend]

Made on the device, where it takes seconds. ``--pretend``: of two layers and a hidden size of 64, on
the CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from measurement import REPOSITORY

# by the shipped config.json that it differs least from
QWEN3_17B = {"hidden_size": 2048, "intermediate_size": 6144}
OTHERS = {"Qwen/Qwen3-1.7B": ("Qwen/Qwen3-0.6B", QWEN3_17B)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pretend", action="store_true")
    args = parser.parse_args()
    import policies
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name, changes = OTHERS.get(args.model, (args.model, {}))
    values = (
        json.loads(
            (
                REPOSITORY / "megatron_dcpo" / "planning" / "models" / name / "config.json"
            ).read_text()
        )
        | changes
    )
    if args.pretend:
        values |= {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 512,
        }
        values |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": None,
        }
    values |= {"eos_token_id": policies.EOS, "torch_dtype": "bfloat16"}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"model_type": values.pop("model_type"), **values})
    with torch.device("cpu" if args.pretend or not torch.cuda.is_available() else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(policies.QUICKSTART / "policy" / name, args.out / name)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
