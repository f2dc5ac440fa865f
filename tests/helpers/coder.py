"""A tiny policy that writes programs, and the problems that it writes them for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.helpers.paths import QUICKSTART

NUMBERS = range(2, 8)


def response_text(number: int, wrong: int, confidence: int) -> str:
    return (
        f"```python\ndef f():\n return {number + 7 + wrong}\n```\n<conf> Confidence: 0.{confidence}"
    )


def problem_rows() -> list[dict[str, Any]]:
    return [
        {
            "problem": f"f={number}+7",
            "tests": {
                "kind": "function",
                "entry_point": "f",
                "cases": [{"args": [], "kwargs": {}, "expected": number + 7}],
            },
        }
        for number in NUMBERS
    ]


def make_coder(root: Path) -> tuple[Path, Path]:
    """The quickstart's tiny policy, taught for seconds to write programs of which a third is wrong;
    and its problems.
    """
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "policy")
    model = Qwen3ForCausalLM.from_pretrained(QUICKSTART / "policy", dtype=torch.float32)
    generator = random.Random(0)
    texts = [
        (
            tokenizer.encode(f"f={number}+7"),
            tokenizer.encode(
                response_text(number, wrong, generator.randint(1, 9)) + tokenizer.eos_token
            ),
        )
        for number in NUMBERS
        for wrong in (0, 0, 1)
    ]
    width = max(len(prompt) + len(response) for prompt, response in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    labels = torch.full((len(texts), width), -100)
    for row, (prompt, response) in enumerate(texts):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(root / "policy")
    tokenizer.save_pretrained(root / "policy")
    GenerationConfig.from_pretrained(QUICKSTART / "policy").save_pretrained(root / "policy")
    (root / "code.jsonl").write_text("\n".join(map(json.dumps, problem_rows())) + "\n")
    return root / "policy", root / "code.jsonl"
