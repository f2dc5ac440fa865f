"""A training step whose confidence an adapter states, against GRPO's step on the same responses: the price of the second
stream (docs/adapters.md). Both leave the same gradient for the policy, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from measurement import Measurement, in_turns, timed

ADAPTER = (
    "objective.name=dcpo", "objective.preset=dcpo_proper", "objective.confidence_parameters=adapter",
    "objective.confidence_sees=logprobs", "model.adapter.rank=16",
)  # fmt: skip
WHOLE = ("model.adapter.activated=false", "objective.confidence_sees=text")
PACKED = ("parallel.sequence_packing=true", "training.max_tokens_per_micro_batch=2048")
OWN_TOKENS = ("judging.confidence_tokens=101",)
CASES = {  # tokens of each of 8 responses to 4 prompts, probability of an end, options, those of the adapter
    "48 tokens": (48, 0.0, ("training.micro_batch_size=32",), ()),
    "48 tokens, confidence tokens": (48, 0.0, ("training.micro_batch_size=32",), OWN_TOKENS),
    "256 tokens": (256, 0.0, ("training.micro_batch_size=8",), ()),
    "16 to 256 tokens, packed": (256, 0.01, PACKED, ()),
    "16 to 256 tokens, packed, confidence tokens": (256, 0.01, PACKED, OWN_TOKENS),
    "256 tokens, on the whole text": (256, 0.0, ("training.micro_batch_size=8",), WHOLE),
}
ROUNDS = 4


def measurements() -> Iterator[Measurement]:
    import policies

    from megatron_dcpo.runtime.watchdog import Timers
    from megatron_dcpo.training.sampling import sample_step
    from megatron_dcpo.training.update import MiniBatch, accumulate, score, update_policy

    for name, (tokens, stop, more, own) in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            model = policies.write_policy(Path(scratch, "policy"), "28M", stop)
            options = policies.overrides(model, Path(scratch, "run"), 4, 8, tokens, *more)
            grpo, ours = policies.training_run(options), policies.training_run([*options, *ADAPTER, *own])
            drawn = sample_step(grpo, 1, Timers(grpo.watch))
            samples = [replace(s, judgement=replace(s.judgement, correct=i % 2)) for i, s in enumerate(drawn)]
            gradients = []
            for run in (grpo, ours):
                for chunk in run.policy.chunks:
                    chunk.zero_grad_buffer()
                accumulate(run, score(run, MiniBatch.of(run, samples)))
                gradients.append([b.grad_data.clone() for chunk in run.policy.chunks for b in chunk.buffers])
            same = all(a.equal(b) for a, b in zip(*gradients, strict=True))
            turns = in_turns(
                ROUNDS,
                ours=lambda run=ours, s=samples: update_policy(run, s, 1),
                grpo=lambda run=grpo, s=samples: update_policy(run, s, 1),
            )
            count = sum(len(sample.response_ids) for sample in samples)
            reason = f"{count} response tokens, 28M parameters; the policy's gradients are equal bit for bit"
            other = "objective.name=grpo on the same responses"
            fields = {"goal": None if own == WHOLE else 1.15, "same": same, "reason": reason}
            yield timed(f"adapter_step/{name}", turns["ours"], turns["grpo"], other, how=min, **fields)


if __name__ == "__main__":
    for measurement in measurements():
        print(measurement.line("python benchmarks/run.py adapter_step"))
