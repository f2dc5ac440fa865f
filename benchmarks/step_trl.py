"""A whole training step against TRL's GRPOTrainer: the same policy, prompts, group size and
lengths, one thread each.

    DCPO_PEERS=peers/bin/python python benchmarks/run.py step_trl

Each trains in a process of its own and takes a step when it is its turn: rollout with transformers,
judging, log-probs, loss, AdamW. Every response is trained on by both: of ours half of each group is
right (nothing that a random policy writes is), TRL's reward is the length modulo 7 plus the index
modulo 3. Times are per response token where lengths differ; peaks are resident memory with the
interpreter and all imports. The least step has what none can leave out: the model's passes over
every prompt and token, and Megatron-core's bare update.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measurement import (
    PEERS,
    QUICK,
    Measurement,
    Stepper,
    Turns,
    absent,
    cpu_seconds,
    not_installed,
    peer_has,
    steps,
)

OTHER = "TRL 1.16 GRPOTrainer"


@dataclass(frozen=True)
class Case:
    """``stop``: the probability that a token ends its response; ``rounds`` are measured.
    ``bounded``: the least step too.
    """

    shape: str
    prompts: int
    group: int
    tokens: int
    stop: float
    micro_batch: int
    goal: float
    rounds: int
    bounded: bool = False


CASES = {
    "131k": Case("131k", 32, 8, 16, 0.0, 256, 0.55, 12, bounded=True),
    "28M": Case("28M", 8, 8, 48, 0.0, 64, 1.0, 3),
    "28M, ragged": Case("28M", 8, 8, 256, 0.01, 16, 0.67, 2),
    "28M, large vocabulary": Case("28M, large vocabulary", 4, 8, 48, 0.0, 16, 1.0, 2),
}


def cases() -> dict[str, Case]:
    """All cases; of the form of seconds the smallest, with one round."""
    return {"131k": replace(CASES["131k"], rounds=1)} if QUICK else CASES


def measurements() -> Iterator[Measurement]:
    import policies

    if not peer_has("trl"):
        for name, case in cases().items():
            yield absent(
                f"step_trl/{name}", "s", OTHER, not_installed("trl==1.16.0"), goal=case.goal
            )
        return
    for name, case in cases().items():
        with tempfile.TemporaryDirectory() as scratch:
            model = str(policies.write_policy(Path(scratch, "policy"), case.shape, case.stop))
            with (
                Stepper(sys.executable, __file__, "ours", name, model, scratch) as ours,
                Stepper(PEERS, __file__, "trl", name, model, scratch) as trl,
            ):
                found = [(ours.step(), trl.step()) for _ in range(case.rounds + 1)][1:]
        yield from _compared(name, case, found)


def _compared(
    name: str, case: Case, found: list[tuple[dict[str, Any], dict[str, Any]]]
) -> Iterator[Measurement]:
    raw = {"ours": [a for a, _ in found], "trl": [b for _, b in found]}
    tokens = [sum(row["tokens"] for row in rows) for rows in raw.values()]
    # the same draws are not possible: lengths are equal in distribution, and exactly where none
    # ends early
    same = abs(tokens[0] / tokens[1] - 1) <= (0.2 if case.stop else 0.0)
    facts: dict[str, Any] = {
        "goal": case.goal,
        "same": same,
        "reason": f"{tokens[0]} and {tokens[1]} response tokens",
    }
    for what, clock in (("", "cpu"), (", wall", "wall")):
        a, b = (
            statistics.median(1e3 * row[clock] / row["tokens"] for row in rows)
            for rows in raw.values()
        )
        named = "processor" if clock == "cpu" else clock
        unit = f"ms per response token ({named} time, median of {len(found)} steps)"
        if case.bounded:
            least = statistics.median(
                1e3 * row[f"least_{clock}"] / row["tokens"] for row in raw["ours"]
            )
            facts |= {
                "bound": least / b,
                "bound_is": "the passes of the model and Megatron-core's bare update",
            }
        yield Measurement(
            f"step_trl/{name}{what}", a, b, unit, OTHER, **facts, raw={} if what else raw
        )
    parts = [
        statistics.median(1e3 * row["train_cpu"] / row["tokens"] for row in rows)
        for rows in raw.values()
    ]
    unit = "ms per response token (processor time without rollout, judging and weight transfer)"
    yield Measurement(f"step_trl/{name}, training alone", *parts, unit, OTHER, same=same)
    peaks = [max(row["peak_bytes"] for row in rows) for rows in raw.values()]
    yield Measurement(
        f"step_trl/{name}, memory", *peaks, "bytes resident at most", OTHER, goal=1.0, same=same
    )


def ours(case: Case, model: Path, scratch: Path) -> None:
    import policies

    more = [f"training.micro_batch_size={case.micro_batch}"]
    if case.stop:
        more = ["parallel.sequence_packing=true", "training.max_tokens_per_micro_batch=2048"]
    options = policies.overrides(
        model, scratch / "run", case.prompts, case.group, case.tokens, *more
    )
    with policies.training_run(options) as run:
        least = least_step(run, case) if case.bounded else None
        for number, report in enumerate(steps(), 1):
            step, passes = Turns(), Turns()
            step.take(lambda number=number: policies.training_step(run, number))
            facts = step.result | {"wall": step.wall[0], "cpu": step.cpu[0]}
            if least:
                passes.take(least)
                facts |= {"least_wall": passes.wall[0], "least_cpu": passes.cpu[0]}
            report(**facts)


def least_step(run: Any, case: Case) -> Callable[[], None]:
    """The passes of the model over a rollout's prompts, each once, and tokens, and the bare update
    of Megatron-core.
    """
    import policies
    import torch
    from step_megatron import Bare

    from megatron_dcpo.rollout.transformers_engine import _Running, prefill

    samples = policies.sampled(run, 1)
    bare = Bare(run, run.updater.method.score(samples))
    prompts = [list(s.prompt.ids) for s in samples[:: case.group]]
    tokens = torch.tensor([list(s.response_ids) for s in samples])
    rows = torch.arange(case.prompts).repeat_interleave(case.group)

    @torch.no_grad()
    def roll_out() -> None:
        logits, cache, mask, position = prefill(run.engine.model, prompts)
        cache.batch_select_indices(rows)
        running = _Running(rows, logits[rows], cache, mask[rows], position[rows])
        for place in range(case.tokens - 1):
            running.step(run.engine.model, tokens[:, place])

    def step() -> None:
        roll_out()
        bare.step()

    return step


def trl(case: Case, model: Path, scratch: Path) -> None:
    import os

    import policies
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    asked, spent, responses = steps(), {"rollout": 0.0}, []

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.report = next(asked, None)
            if self.report is None:
                os._exit(0)
            self.begin, spent["rollout"] = cpu_seconds(), 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            train = cpu_seconds() - self.begin - spent["rollout"]
            self.report(rollout_cpu=spent["rollout"], train_cpu=train, tokens=sum(responses))

    class Timed(GRPOTrainer):
        def _generate(self, *arguments: Any, **options: Any) -> Any:
            begin = cpu_seconds()
            result = super()._generate(*arguments, **options)
            spent["rollout"] += cpu_seconds() - begin
            return result

    def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        responses[:] = [len(ids) for ids in completion_ids]
        return [float(len(ids) % 7) + index % 3 for index, ids in enumerate(completion_ids)]

    options = GRPOConfig(
        output_dir=str(scratch / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=case.micro_batch,
        max_steps=1000,
        save_strategy="no",
        logging_strategy="no",
        gradient_accumulation_steps=case.prompts * case.group // case.micro_batch,
        num_generations=case.group,
        max_completion_length=case.tokens,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        beta=0.0,
        max_grad_norm=1.0,
        dataloader_num_workers=0,
    )
    Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=length,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": text} for text in policies.problems(480)]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Turns()],
    ).train()


if __name__ == "__main__":
    side, name, model, scratch = sys.argv[1:]
    {"ours": ours, "trl": trl}[side](CASES[name], Path(model), Path(scratch))
