"""A step of supervised training against TRL's SFTTrainer, and against a plain PyTorch loop: the
same model, demonstrations and batches, one thread each.

    DCPO_PEERS=peers/bin/python python benchmarks/run.py sft_step

Each trains in a process of its own and takes a step when it is its turn: forward, loss on the
response's tokens, backward, AdamW. Responses have 16 to 96 tokens. Ours packs them; the peers pad
them, as TRL does without flash attention. The plain loop computes logits at the response's
positions only, as ``examples/smollm2`` did before ``dcpo sft``. All losses of the first step are
equal.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurement import (
    PEERS,
    QUICK,
    Measurement,
    Stepper,
    absent,
    cpu_seconds,
    not_installed,
    peer_has,
    steps,
)

TRL = "TRL 1.16 SFTTrainer"
PLAIN = "a plain PyTorch loop on transformers' model"
PER_STEP = 32
MICRO_BATCH = 8


@dataclass(frozen=True)
class Case:
    """``rounds`` are measured, after one that is not."""

    shape: str
    rounds: int


CASES = {"28M": Case("28M", 5)}


def cases() -> dict[str, Case]:
    """All cases; of the form of seconds a small one, with one round."""
    return {"131k": Case("131k", 1)} if QUICK else CASES


def measurements() -> Iterator[Measurement]:
    import policies

    for name, case in cases().items():
        with tempfile.TemporaryDirectory() as scratch:
            model = str(policies.write_policy(Path(scratch, "policy"), case.shape))
            write_demonstrations(Path(scratch, "rows.jsonl"), case.rounds + 1)
            arguments = (__file__, model, scratch)
            yield from against(name, case, arguments, "plain", sys.executable, PLAIN)
            if peer_has("trl"):
                yield from against(name, case, arguments, "trl", PEERS, TRL)
            else:
                yield absent(
                    f"sft_step/{name}, trl", "s", TRL, not_installed("trl==1.16.0"), goal=1.0
                )


def against(
    name: str, case: Case, arguments: tuple[str, str, str], side: str, python: str, what: str
) -> Iterator[Measurement]:
    file, model, scratch = arguments
    with (
        Stepper(sys.executable, file, "ours", model, scratch) as ours,
        Stepper(python, file, side, model, scratch) as other,
    ):
        found = [(ours.step(), other.step()) for _ in range(case.rounds + 1)]
    first = [row["loss"] for row in found[0]]
    facts: dict[str, Any] = {
        "same": abs(first[0] - first[1]) < 1e-3 * abs(first[1]),
        "reason": f"first losses {first[0]:.5f} and {first[1]:.5f}",
    }
    a, b = (
        statistics.median(1e3 * row["cpu"] / row["tokens"] for row in rows)
        for rows in zip(*found[1:], strict=True)
    )
    yield Measurement(
        f"sft_step/{name}, {side}",
        a,
        b,
        f"ms per token (processor time, median of {case.rounds} steps)",
        what,
        goal=1.0,
        **facts,
    )


def write_demonstrations(path: Path, batches: int) -> None:
    """Demonstrations of digits, in the order in which all sides take them."""
    chosen = random.Random(0)
    rows = []
    for _ in range(batches * PER_STEP):
        prompt = "".join(chosen.choices("0123456789*", k=12)) + "="
        length = chosen.randint(16, 96)
        response = "".join(chosen.choices("0123456789", k=length))
        rows.append({"prompt": prompt, "completion": response})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(scratch: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (scratch / "rows.jsonl").open()]


def ours(model: Path, scratch: Path) -> None:
    from megatron_dcpo.config.supervised import validate_supervised
    from megatron_dcpo.training.supervised import build, read_inputs

    config = validate_supervised(
        {
            "run_dir": str(scratch / "run"),
            "model": {"path": str(model), "params_dtype": "fp32"},
            "parallel": {"sequence_packing": True},
            "data": {
                "path": str(scratch / "rows.jsonl"),
                "template": "raw",
                "examples_per_step": PER_STEP,
                "shuffle": False,
            },
            "optimizer": {"lr": 1e-5, "weight_decay": 0.0},
            "training": {"max_tokens_per_micro_batch": MICRO_BATCH * 64},
            "logging": {"to": []},
        }
    )
    with build(config, read_inputs(config)) as run:
        for number, report in enumerate(steps(), 1):
            samples = run.draw(number)
            update = run.update(samples, number)
            tokens = sum(sample.length for sample in samples)
            report(tokens=tokens, loss=update.losses[0])


def plain(model: Path, scratch: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adam = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    rows = []
    for row in read(scratch):
        prompt = tokenizer.encode(row["prompt"])
        response = tokenizer.encode(row["completion"], add_special_tokens=False)
        rows.append((prompt, [*response, tokenizer.eos_token_id]))
    for number, report in enumerate(steps()):
        batch = rows[number * PER_STEP : (number + 1) * PER_STEP]
        count = sum(len(response) for _, response in batch)
        # similar lengths together: the best that padding can do
        batch.sort(key=lambda row: len(row[0]) + len(row[1]))
        total = 0.0
        for start in range(0, PER_STEP, MICRO_BATCH):
            loss = response_loss(network, batch[start : start + MICRO_BATCH]) / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        tokens = sum(len(prompt) + len(response) for prompt, response in batch)
        report(tokens=tokens, loss=total)


def response_loss(model: Any, batch: list[tuple[list[int], list[int]]]) -> Any:
    """The summed cross entropy of the response tokens; logits at their positions only."""
    import torch
    from torch.nn.functional import cross_entropy

    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in batch])
    at = [(i, len(p) - 1 + k) for i, (p, a) in enumerate(batch) for k in range(len(a))]
    rows, columns = (torch.tensor(index) for index in zip(*at, strict=True))
    hidden = model.model(tokens).last_hidden_state
    logits = model.lm_head(hidden[rows, columns])
    return cross_entropy(logits, tokens[rows, columns + 1], reduction="sum")


def trl(model: Path, scratch: Path) -> None:
    import os

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    asked = steps()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = read(scratch)
    lengths = [len(tokenizer.encode(row["prompt"] + row["completion"])) + 1 for row in rows]

    class Turns(TrainerCallback):
        done = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.report = next(asked, None)
            if self.report is None:
                os._exit(0)
            self.begin = cpu_seconds()

        def on_log(self, *arguments: Any, logs: Any = None, **__: Any) -> None:
            if logs is None or "loss" not in logs:
                return
            taken = lengths[self.done * PER_STEP : (self.done + 1) * PER_STEP]
            self.done += 1
            self.report(tokens=sum(taken), loss=logs["loss"])

    options = SFTConfig(
        output_dir=str(scratch / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PER_STEP // MICRO_BATCH,
        max_steps=1000,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        max_grad_norm=1.0,
        max_length=None,
        completion_only_loss=True,
        dataloader_num_workers=0,
    )

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Turns()],
    ).train()


if __name__ == "__main__":
    side, model, scratch = sys.argv[1:]
    {"ours": ours, "plain": plain, "trl": trl}[side](Path(model), Path(scratch))
