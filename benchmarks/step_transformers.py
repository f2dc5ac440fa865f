"""Our training step against plain transformers + PyTorch on a real language model: the same
micro-batches in turns.

    python benchmarks/run.py step_transformers        # needs runs/smollm2/policy
    (examples/smollm2/prepare.sh)

Each trains in a process of its own and takes a step when it is its turn. Ours is
``Updater.update``. Plain is what one writes by hand: a padded batch, ``model(...).logits`` at the
response's positions, the policy gradient with the same advantages and divisors, ``AdamW``. The
gradient norms must agree. Peaks are resident memory; ours holds the engine's copy of the weights
and its cache as well, which plain training does not have.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurement import Measurement, Stepper, absent, steps

MODEL = Path("runs/smollm2/policy")
PROMPTS, GROUP, TOKENS, MICRO_BATCH, ROUNDS = 8, 8, 48, 16, 4
OTHER = "transformers + PyTorch"


def measurements() -> Iterator[Measurement]:
    if not MODEL.is_dir():
        yield absent(
            "step_transformers/SmolLM2-135M",
            "s",
            OTHER,
            f"{MODEL} is missing: examples/smollm2/prepare.sh",
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        batch = Path(scratch, "batch.json")
        with Stepper(sys.executable, __file__, "ours", str(batch), scratch) as ours:
            first = ours.step()  # writes the micro-batches
            with Stepper(sys.executable, __file__, "plain", str(batch), scratch) as plain:
                found = [(ours.step(), plain.step()) for _ in range(ROUNDS + 1)][1:]
    raw = {"ours": [first, *(a for a, _ in found)], "plain": [b for _, b in found]}
    norms = found[0][0]["grad_norm"], found[0][1]["grad_norm"]
    same = abs(norms[0] / norms[1] - 1) < 1e-3
    reason = f"{first['tokens']} tokens; gradient norms {norms[0]:.5f} and {norms[1]:.5f}"
    seconds = [statistics.median(row["cpu"] for row in rows) for rows in zip(*found, strict=True)]
    unit = f"s of a processor, median of {ROUNDS} steps"
    yield Measurement(
        "step_transformers/SmolLM2-135M",
        *seconds,
        unit,
        OTHER,
        goal=1.0,
        same=same,
        reason=reason,
        raw=raw,
    )
    peaks = [max(row["peak_bytes"] for row in rows) for rows in zip(*found, strict=True)]
    yield Measurement(
        "step_transformers/SmolLM2-135M, memory", *peaks, "bytes resident at most", OTHER, same=same
    )


def ours(batch: Path, scratch: Path) -> None:
    import policies

    more = (
        f"training.micro_batch_size={MICRO_BATCH}",
        "data.template=chat",
        "data.max_prompt_length=96",
    )
    options = policies.overrides(MODEL, scratch / "run", PROMPTS, GROUP, TOKENS, *more)
    options = [*options, f"data.path={MODEL.parent / 'data' / 'train.jsonl'}", "optimizer.lr=1e-9"]
    with policies.training_run(options) as run:
        drawn = run.sampler.sample(1)
        samples = [
            replace(s, judgement=replace(s.judgement, correct=i % 2)) for i, s in enumerate(drawn)
        ]
        scored = run.updater.method.score(samples)
        local, micro_batches = run.updater.deal(scored)
        rows = [
            {
                "prompt": list(map(int, s.prompt.ids)),
                "response": s.response_ids.tolist(),
                "gains": (s.weights * s.advantages).tolist(),
            }
            for s in (scored[i] for i in local)
        ]
        batch.write_text(
            json.dumps([[rows[i] for i in micro_batch] for micro_batch in micro_batches])
        )
        for report in steps():
            _, done = run.updater.update(samples, 2)
            report(
                grad_norm=done["grad_norms"][0],
                tokens=sum(len(r["prompt"]) + len(r["response"]) for r in rows),
            )


def plain(batch: Path, scratch: Path) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
    micro_batches = json.loads(batch.read_text())

    def loss(rows: list[dict[str, Any]]) -> torch.Tensor:
        width = max(len(row["prompt"]) + len(row["response"]) for row in rows)
        ids = [row["prompt"] + row["response"] for row in rows]
        tokens = torch.tensor([one + [0] * (width - len(one)) for one in ids])
        mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in ids])
        places = [
            (i, len(r["prompt"]) - 1 + k)
            for i, r in enumerate(rows)
            for k in range(len(r["response"]))
        ]
        row, column = torch.tensor(places).T
        hidden = model.model(tokens, attention_mask=mask).last_hidden_state
        gains = torch.tensor([gain for r in rows for gain in r["gains"]])
        return (
            gains
            * cross_entropy(
                model.lm_head(hidden[row, column]), tokens[row, column + 1], reduction="none"
            )
        ).sum()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        for rows in micro_batches:
            loss(rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(norm)

    for report in steps():
        report(grad_norm=step())


if __name__ == "__main__":
    side, batch, scratch = sys.argv[1:]
    {"ours": ours, "plain": plain}[side](Path(batch), Path(scratch))
