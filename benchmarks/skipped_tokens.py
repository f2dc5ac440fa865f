"""What it saves that responses without a gradient are not computed: updates of one batch with and
without them, in turns.

    python benchmarks/run.py skipped_tokens

The 28M policy with GRPO; in 4 of 8 groups every answer is right. The bound is the share of the
tokens that are computed: the groups with a gradient, and 2 of the 32 other responses for their
mismatch. The learning rate is 0, so that both gradients are the same in every round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurement import QUICK, Measurement, in_turns, timed

PROMPTS, GROUP, TOKENS, ROUNDS = (4, 8, 16, 1) if QUICK else (8, 8, 48, 4)
SHAPE = "131k" if QUICK else "28M"


def measurements() -> Iterator[Measurement]:
    import policies

    from megatron_dcpo.policy.batching import sequence_length

    def update(run: Any, samples: list[Any], everything: bool) -> tuple[float, int]:
        # an entropy term, however small, gives every response a gradient
        coef = 1e-30 if everything else 0.0
        run.updater.method = method.with_entropy_coef(coef)
        statistics = policies.update(run, samples, 2)
        assert statistics.grad_norms[0] > 0
        return statistics.grad_norms[0], sum(map(sequence_length, statistics.trained))

    with tempfile.TemporaryDirectory() as scratch:
        model = policies.write_policy(Path(scratch, "policy"), SHAPE, 0.0)
        more = "training.micro_batch_size=16", "optimizer.lr=0"
        with policies.training_run(
            policies.overrides(model, Path(scratch, "run"), PROMPTS, GROUP, TOKENS, *more)
        ) as run:
            method = run.updater.method
            samples = policies.sampled(run, 1)
            even = {s.prompt.prompt_id for s in samples[:: 2 * GROUP]}  # right throughout
            samples = [
                replace(s, judgement=replace(s.judgement, correct=1.0))
                if s.prompt.prompt_id in even
                else s
                for s in samples
            ]
            turns = in_turns(
                ROUNDS,
                ours=lambda: update(run, samples, everything=False),
                other=lambda: update(run, samples, everything=True),
            )
    (norm, some), (other_norm, tokens) = turns["ours"].result, turns["other"].result
    apart = abs(norm / other_norm - 1)
    yield timed(
        f"skipped_tokens/{SHAPE}",
        turns["ours"],
        turns["other"],
        "every response computed",
        goal=some / tokens + 0.05,
        how=min,
        same=apart <= 1e-5,
        bound=some / tokens,
        bound_is="the share of the tokens that are computed",
        reason=f"{some} of {tokens} tokens are computed; the gradients' norms differ by "
        f"{apart:.1g} of one (at most 1e-5)",
    )


if __name__ == "__main__":
    for measurement in measurements():
        print(measurement.line("python benchmarks/run.py skipped_tokens"))
