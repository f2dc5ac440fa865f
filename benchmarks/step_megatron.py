"""Our training step against Megatron-core's bare one: the same tokens, micro-batches, model,
optimizer and gradient.

Ours is ``Updater.update``: micro-batches, scores, log-probs, entropies, loss, engine against
trainer, statistics, the checks for numbers that are not finite, optimizer. Bare is
``forward_backward_func`` with Megatron's own cross-entropy (``labels=...``) on micro-batches that
are ready, weighted so that its gradient is the same, and the optimizer. Where no response ends
early, a third side takes its turn: the model of Hugging Face on one padded batch of the same
tokens, autograd, torch's clipping and AdamW, the least that a trainer on transformers has to do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import QUICK, Measurement, in_turns, timed

CASES = {  # policy, prompts, responses to each, tokens, probability of an end, options, rounds
    "131k": ("131k", 32, 8, 16, 0.0, ("training.micro_batch_size=256",), 20),
    "28M": ("28M", 8, 8, 48, 0.0, ("training.micro_batch_size=64",), 4),
    "28M, ragged, packed": (
        "28M",
        4,
        8,
        256,
        0.01,
        ("parallel.sequence_packing=true", "training.max_tokens_per_micro_batch=2048"),
        4,
    ),
}


def measurements() -> Iterator[Measurement]:
    import policies

    from megatron_dcpo.runtime.distributed import destroy

    for name, (shape, prompts, group, tokens, stop, more, rounds) in CASES.items():
        if QUICK and shape != "131k":
            continue
        with tempfile.TemporaryDirectory() as scratch:
            model = policies.write_policy(Path(scratch, "policy"), shape, stop)
            options = policies.overrides(model, Path(scratch, "run"), prompts, group, tokens, *more)
            with policies.training_run(options) as run:
                plain = None if stop else Plain(model)
                samples = policies.sampled(run, 1)
                yield from compared(name, run, samples, 1 if QUICK else rounds, plain)
        destroy()


def compared(
    name: str, run: Any, samples: list[Any], rounds: int, plain: Plain | None
) -> Iterator[Measurement]:
    import policies

    scored = run.updater.method.score(samples)
    bare = Bare(run, scored)
    gradients = []
    for once in (lambda: run.updater.accumulate(scored), bare.accumulate):
        bare.zero()
        once()
        gradients.append(
            [buffer.grad_data.clone() for chunk in run.policy.chunks for buffer in chunk.buffers]
        )
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))
    sides = {"ours": lambda: policies.update(run, samples, 1), "bare": bare.step}
    if plain is not None:
        batch = plain.batch(scored)
        sides["plain"] = lambda: plain.step(*batch)
    turns = in_turns(rounds, **sides)
    tokens = sum(len(sample.response_ids) for sample in samples)
    assert turns["ours"].result.grad_norms[-1] > 0, "a step that trains nothing"
    reason = (
        f"{tokens} response tokens; the gradients' relative difference is {apart:.1g} (at most "
        "1e-4)"
    )
    other = "forward_backward_func, cross-entropy and optimizer of Megatron-core"
    fields = {"goal": 1.05, "same": apart <= 1e-4, "reason": reason}
    yield timed(f"step_megatron/{name}", turns["ours"], turns["bare"], other, how=min, **fields)
    if plain is not None:
        other = "the model of transformers, autograd, clipping and AdamW of torch"
        name = f"step_megatron/{name}, against transformers"
        yield timed(name, turns["ours"], turns["plain"], other, how=min, goal=1.0, same=True)


class Plain:
    """A policy-gradient step on the model of Hugging Face, without Megatron."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def batch(self, scored: Any) -> tuple[Any, Any, Any]:
        """Return the tokens of prompts and responses, padded on the left, their mask, and what
        multiplies the log-probs of the responses. All responses are equally long.
        """
        import numpy as np
        import torch

        longest = max(len(one.input_ids) for one in scored)
        tokens = torch.zeros(len(scored), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, one in enumerate(scored):
            tokens[row, longest - len(one.input_ids) :] = torch.as_tensor(one.input_ids)
            mask[row, longest - len(one.input_ids) :] = 1
        weights = np.stack([one.weights * one.advantages for one in scored])
        return tokens, mask, torch.as_tensor(weights, dtype=torch.float32)

    def step(self, tokens: Any, mask: Any, weights: Any) -> None:
        import torch

        count = weights.shape[1]
        outputs = self.model(input_ids=tokens, attention_mask=mask, logits_to_keep=count + 1)
        logits = outputs.logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, -count:, None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        (-(ratio * weights).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bare:
    """The step without us."""

    def __init__(self, run: Any, scored: Any) -> None:
        import numpy as np
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_dcpo.policy.batching import collate, sequence_length

        self.run, self.forward_backward = run, get_forward_backward_func()
        self.batches = []
        packing = run.config.parallel.sequence_packing
        local, micro_batches = run.updater.trainer.deal(scored)
        samples = [scored[i] for i in local]
        self.longest = max(map(sequence_length, samples))
        for batch in collate(samples, micro_batches, packing=packing):
            labels, weights = (torch.zeros_like(batch.tokens), torch.zeros(batch.tokens.shape))
            labels.view(-1)[batch.rows] = batch.targets
            parts = [s.weights * s.advantages for s in batch.samples]
            weights.view(-1)[batch.rows] = torch.as_tensor(
                np.concatenate(parts), dtype=torch.float32
            )
            self.batches.append((batch, labels, weights))

    def zero(self) -> None:
        self.run.optimizer.zero_gradients()

    def accumulate(self) -> None:
        import torch

        def forward(batches: Any, model: Any) -> Any:
            batch, labels, weights = next(batches)
            packed = batch.packed_seq_params
            losses = model(
                batch.tokens, batch.position_ids, None, labels=labels, packed_seq_params=packed
            )
            one = torch.ones((), dtype=torch.int)
            return losses, lambda output: ((output * weights).sum() * len(self.batches), one, {})

        layers = [gpt.output_layer for gpt in self.run.policy.gpt if gpt.post_process]
        ours = [
            layer.__dict__.pop("forward") for layer in layers
        ]  # the policy's own; Megatron's is the class's
        self.forward_backward(
            forward_step_func=forward,
            data_iterator=iter(self.batches),
            model=list(self.run.policy.chunks),
            num_microbatches=len(self.batches),
            seq_length=self.longest,
            micro_batch_size=1,
            forward_only=False,
        )
        for layer, forward_of_ours in zip(layers, ours, strict=True):
            layer.forward = forward_of_ours

    def step(self) -> None:
        self.zero()
        self.accumulate()
        self.run.optimizer.megatron.step()
        self.run.optimizer.scheduler.step(1)


if __name__ == "__main__":
    for measurement in measurements():
        print(measurement.line("python benchmarks/run.py step_megatron"))
