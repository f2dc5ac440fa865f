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

from measurement import Measurement, in_turns, timed

PROMPTS, GROUP, TOKENS, ROUNDS = 8, 8, 48, 4


def measurements() -> Iterator[Measurement]:
    import policies

    from megatron_dcpo.policy.batching import sequence_length
    from megatron_dcpo.training import updater

    leave_out = updater.computed

    def update(run: Any, samples: list[Any], everything: bool) -> tuple[float, int]:
        updater.computed = (lambda scored, *_: list(scored)) if everything else leave_out
        statistics = run.updater.update(samples, 2)[1]
        updater.computed = leave_out
        return statistics["grad_norms"][0], sum(map(sequence_length, statistics["computed"]))

    with tempfile.TemporaryDirectory() as scratch:
        model = policies.write_policy(Path(scratch, "policy"), "28M", 0.0)
        more = "training.micro_batch_size=16", "optimizer.lr=0"
        with policies.training_run(
            policies.overrides(model, Path(scratch, "run"), PROMPTS, GROUP, TOKENS, *more)
        ) as run:
            drawn = sorted(run.sampler.sample(1), key=lambda sample: sample.response.key)
            even = {s.prompt.prompt_id for s in drawn[:: 2 * GROUP]}  # right throughout
            samples = [
                replace(
                    s,
                    judgement=replace(
                        s.judgement, correct=1.0 if s.prompt.prompt_id in even else float(i % 2)
                    ),
                )
                for i, s in enumerate(drawn)
            ]
            turns = in_turns(
                ROUNDS,
                ours=lambda: update(run, samples, everything=False),
                other=lambda: update(run, samples, everything=True),
            )
    (norm, some), (other_norm, tokens) = turns["ours"].result, turns["other"].result
    apart = abs(norm / other_norm - 1)
    yield timed(
        "skipped_tokens/28M",
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
