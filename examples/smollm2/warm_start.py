"""Supervised warm start: teach SmolLM2-135M-Instruct the tasks and the format, in about ten
minutes of two cores.

    python warm_start.py --base DIR --data DIR --out DIR

Full fine-tuning in fp32, one pass over the warm-start split: a terse worked solution, the boxed
answer, and a confidence drawn uniformly from 0.00 to 1.00 that does not look at the problem. So
every number has support, and none means anything. The loss covers the response. The saved tokenizer
has a chat template of one line per message, without a system message.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Example = tuple[list[int], list[int]]


def response(row: dict[str, Any], random_: random.Random) -> str:
    return (
        f"{row['solution']}\n\\boxed{{{row['answer']}}}\n<conf> Confidence: "
        f"{random_.randint(0, 100) / 100:.2f}"
    )


def read_examples(path: Path, tokenizer: Any, seed: int) -> list[Example]:
    """Return (prompt ids, response ids) of every row, the end token included."""
    random_ = random.Random(seed)
    examples = []
    for row in map(json.loads, path.read_text().splitlines()):
        messages = [{"role": "user", "content": row["problem"]}]
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        answer = [
            *tokenizer.encode(response(row, random_), add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        examples.append((tokenizer.encode(prompt, add_special_tokens=False), answer))
    random_.shuffle(examples)
    return examples


def batches(examples: list[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches of similar lengths in random order: the pool of 32 batches is sorted by
    length.
    """
    random_ = random.Random(seed)
    for start in range(0, len(examples), 32 * size):
        pool = sorted(
            examples[start : start + 32 * size], key=lambda e: len(e[0]) + len(e[1])
        )
        cut = [pool[i : i + size] for i in range(0, len(pool), size)]
        random_.shuffle(cut)
        yield from cut


def response_loss(model: Any, batch: list[Example]) -> Tensor:
    """Return the mean cross entropy of the response tokens; logits are computed at their positions
    only.
    """
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in batch])
    at = [(i, len(p) - 1 + k) for i, (p, a) in enumerate(batch) for k in range(len(a))]
    rows, columns = (torch.tensor(index) for index in zip(*at, strict=True))
    hidden = model.model(
        tokens
    ).last_hidden_state  # padding stands on the right: causal attention never sees it
    return cross_entropy(
        model.lm_head(hidden[rows, columns]), tokens[rows, columns + 1]
    )


def train(
    model: Any, examples: list[Example], batch_size: int, lr: float, seed: int
) -> None:
    """Train one pass with AdamW: warm-up over a tenth, then cosine to a tenth of ``lr``."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    steps, started = math.ceil(len(examples) / batch_size), time.monotonic()
    for step, batch in enumerate(batches(examples, batch_size, seed), start=1):
        done = step / steps
        optimizer.param_groups[0]["lr"] = lr * min(
            10 * done, 0.55 + 0.45 * math.cos(math.pi * done)
        )
        loss = response_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(
                f"warm start: batch {step}/{steps}, loss {loss.item():.3f}, {seconds:.0f} s",
                file=sys.stderr,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", type=Path, required=True, help="the dequantized model"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="the directory written by tasks.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--limit", type=int, default=None, help="examples")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    examples = read_examples(args.data / "warm_start.jsonl", tokenizer, args.seed)[
        : args.limit
    ]
    print(
        f"warm start: {len(examples)} examples, {sum(len(p) + len(a) for p, a in examples)} "
        "tokens, "
        f"{sum(len(a) for _, a in examples)} of them in responses",
        file=sys.stderr,
    )
    train(model, examples, args.batch_size, args.lr, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
