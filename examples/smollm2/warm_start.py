"""What the warm start learns from: demonstrations of the tasks in the format that RL rewards.

    python warm_start.py --base DIR --data DIR --out DIR
    dcpo sft --config sft.yaml

A terse worked solution, the boxed answer, and a confidence drawn uniformly from 0.00 to 1.00 that
does not look at the problem. So every number has support, and none means anything. Writes
``demonstrations.jsonl``, and the model of ``--base`` again as ``start/``, with a chat template of
one line per message and without a system message.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path

from transformers import AutoTokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_demonstrations(path: Path, out: Path, seed: int) -> None:
    """Write a demonstration for every problem in ``path``, in a random order."""
    chosen = random.Random(seed)
    rows = []
    for line in path.read_text().splitlines():
        problem = json.loads(line)
        confidence = chosen.randint(0, 100) / 100
        response = (
            f"{problem['solution']}\n\\boxed{{{problem['answer']}}}\n"
            f"<conf> Confidence: {confidence:.2f}"
        )
        rows.append({"prompt": problem["problem"], "response": response})
    chosen.shuffle(rows)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_start(base: Path, out: Path) -> None:
    """Write the model again with the chat template; its weights are the same file."""
    out.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        target = out / path.name
        target.unlink(missing_ok=True)
        if path.suffix == ".safetensors":
            os.link(path, target)
        else:
            shutil.copyfile(path, target)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="the dequantized model")
    parser.add_argument(
        "--data", type=Path, required=True, help="the directory written by tasks.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_demonstrations(
        args.data / "warm_start.jsonl", args.out / "demonstrations.jsonl", args.seed
    )
    write_start(args.base, args.out / "start")


if __name__ == "__main__":
    main()
