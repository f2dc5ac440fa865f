"""Partial rollouts (``rollout.max_staleness``) against rollouts that wait for their longest
response.

    python benchmarks/run.py long_tails        # DCPO_DATA: where math500/ and qwen_tokenizer/ are

Trainings of a small policy on the embedded engine, whose responses end at lengths drawn from those
of MATH-500's solutions in Qwen's tokens, shortened by SHORTEN; both take their steps in turns.
Their learning rate is 0, so that what began in the first step has the same tokens in both, however
often it was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import policies
from measurement import DATA, QUICK, Measurement, Stepper, absent, steps

PROMPTS, GROUP, SLOTS, SHORTEN = 16, 4, 64, 4
STEPS, WARM_UP = (4, 1) if QUICK else (12, 3)
ALTERNATIVES = {"before": (), "after": ("rollout.max_staleness=2", "rollout.oversample=2")}


def solution_lengths(data: Path) -> list[int]:
    """Tokens of every solution of MATH-500."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "qwen_tokenizer" / "tokenizer.json"))
    rows = (data / "math500" / "test.jsonl").read_text().splitlines()
    return [len(tokenizer.encode(json.loads(row)["solution"]).ids) for row in rows]


def measurements() -> Iterator[Measurement]:
    try:
        lengths = solution_lengths(DATA)
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = (
            f"not here: math500/test.jsonl and qwen_tokenizer/ below {DATA} (DCPO_DATA): {error}"
        )
        yield absent(
            "long tails", "share of slot-steps in use", "waiting for the longest response", reason
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield from measured(Path(scratch), [max(1, length // SHORTEN) for length in lengths])


def measured(scratch: Path, lengths: list[int]) -> Iterator[Measurement]:
    model = policies.write_policy(scratch / "policy", "131k")
    (scratch / "lengths.json").write_text(json.dumps(lengths))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ALTERNATIVES}
    workers = {
        name: Stepper(sys.executable, __file__, name, str(scratch), str(model)) for name in rows
    }
    with workers["before"] as before, workers["after"] as after:
        for _ in range(STEPS):
            rows["before"].append(before.step())
            rows["after"].append(after.step())
    began = {
        name: {k: v for row in taken for k, v in row.pop("began").items()}
        for name, taken in rows.items()
    }
    shared = began["before"].keys() & began["after"].keys()
    same = len(shared) >= PROMPTS * GROUP and all(
        began["before"][name] == began["after"][name] for name in shared
    )
    sums = {
        name: {key: sum(row[key] for row in taken[WARM_UP:]) for key in taken[0]}
        for name, taken in rows.items()
    }
    raw = {name: {"steps": taken, "sums of the last": sums[name]} for name, taken in rows.items()}
    kept = {
        "same": same,
        "raw": raw,
        "reason": f"{len(shared)} responses that began in the first step are compared",
    }
    other = "waiting for the longest response"
    used = [sums[name]["used"] / sums[name]["total"] for name in ("after", "before")]
    yield Measurement(
        "long tails, embedded engine: utilization",
        *used,
        "share of slot-steps",
        other,
        2.0,
        True,
        **kept,
    )
    for part in ("rollout", "whole"):
        per = [1000 * sums[name][part] / sums[name]["tokens"] for name in ("after", "before")]
        yield Measurement(
            f"long tails, embedded engine: {part}", *per, "ms per trained token", other, 1.0, **kept
        )


def _train(name: str, scratch: Path, model: str) -> None:
    """A training that takes a step when told to, with responses of forced lengths."""
    import torch

    from megatron_dcpo.rollout import transformers_engine

    lengths = json.loads((scratch / "lengths.json").read_text())

    class Forced(transformers_engine._Batch):
        def __init__(self, rows: int, **rest: Any) -> None:
            super().__init__(rows=rows, **rest)
            self.due = torch.zeros(rows, dtype=torch.int64)

        def place(self, row: int, prompt: Any, index: int, *more: Any, **rest: Any) -> None:
            super().place(row, prompt, index, *more, **rest)
            self.due[row] = random.Random(f"{prompt.prompt_id}/{index}").choice(lengths)

        def record(self, rows: Any, token: Any, logprob: Any, ends: Any) -> Any:
            return super().record(rows, token, logprob, self.count[rows] + 1 >= self.due[rows])

    transformers_engine._Batch = Forced  # type: ignore[misc]
    more = [
        f"rollout.max_num_seqs={SLOTS}",
        "objective.tis_level=token",
        "optimizer.lr=0",
        *ALTERNATIVES[name],
    ]
    longest = max(lengths) + 1
    options = policies.overrides(Path(model), scratch / name, PROMPTS, GROUP, longest, *more)
    with policies.training_run([*options, "training.micro_batch_size=64"]) as run:
        take, began, batches = run.rollouts.take, {}, []

        def taken(step: int) -> Any:
            batch = take(step)
            batches.append(batch)
            for response in (one.response for one in batch.samples):
                if response.step == 1:
                    digest = hashlib.sha256(response.token_ids.tobytes()).hexdigest()
                    began[f"{response.prompt_id}/{response.sample_index}"] = digest
            return batch

        run.rollouts.take = taken
        for number, report in enumerate(steps(), 1):
            before = (run.engine.slot_steps.total, run.engine.slot_steps.used)
            row = policies.training_step(run, number)
            total, used = (
                run.engine.slot_steps.total - before[0],
                run.engine.slot_steps.used - before[1],
            )
            whole = row["rollout"] + row["judge"] + row["train"] + row["reshard"]
            stale = batches.pop().metrics.get("rollout/staleness_max", 0)
            report(
                rollout=row["rollout"],
                whole=whole,
                tokens=row["tokens"],
                total=total,
                used=used,
                stale=stale,
                began=began,
            )
            began.clear()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _train(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    else:
        for measurement in measurements():
            print(measurement.line("python benchmarks/run.py long_tails"))
