"""The output layer with a clipped policy loss, forward and backward: ours against Megatron's,
Liger's and the naive one.

    python benchmarks/output_layer.py [--rows 1024] [--vocabulary 151936] [--hidden 256] [--dtype
    fp32] [--rounds 5]

Each alternative starts from the same hidden states and weight on one thread and leaves both
gradients. Megatron's is the product and ``vocab_parallel_cross_entropy``; Liger's the chunked
log-probs of its GRPO loss. Ours gives entropies as well. Memory: most bytes that torch's allocator
held at a time, beyond inputs and weight.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from measurement import QUICK, Measurement, absent, in_turns, not_installed, timed
from torch import Tensor

from megatron_dcpo.policy.output_layer import OutputLayer, fused_loss, token_outputs

MEGATRON, LIGER, NAIVE = (
    "megatron-core vocab_parallel_cross_entropy",
    "Liger chunked log-probs",
    "log_softmax",
)


class Inputs:
    """Hidden states [N, h], weight [V, h], targets and advantages [N]; the same in every
    process.
    """

    def __init__(self, rows: int, vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = (torch.randn(rows, hidden, generator=generator) * 0.5).to(dtype)
        self.weight = (
            (torch.randn(vocabulary, hidden, generator=generator) * 0.1).to(dtype).requires_grad_()
        )
        self.targets = torch.randint(0, vocabulary, (rows,), generator=generator)
        self.advantages = torch.randn(rows, generator=generator)

    def run(self, total: Callable[[Inputs, Tensor], Tensor]) -> list[Tensor]:
        """The loss, and its gradients in the hidden states and the weight."""
        self.weight.grad = None
        hidden = self.hidden.clone().requires_grad_()
        loss = total(self, hidden)
        loss.backward()
        assert hidden.grad is not None
        assert self.weight.grad is not None
        return [loss.detach(), hidden.grad, self.weight.grad]


def clipped(logprobs: Tensor, advantages: Tensor) -> Tensor:
    rho = (logprobs - logprobs.detach()).exp()
    return -torch.minimum(rho * advantages, rho.clamp(0.8, 1.28) * advantages).sum()


def one_pass(x: Inputs, hidden: Tensor) -> Tensor:
    part = lambda rows, outputs: clipped(outputs.logprobs, x.advantages[rows])  # noqa: E731
    return fused_loss(OutputLayer.of(x.weight, len(x.weight)), hidden, x.targets, part)[0]


def two_passes(x: Inputs, hidden: Tensor) -> Tensor:
    outputs = token_outputs(OutputLayer.of(x.weight, len(x.weight)), hidden, x.targets)
    return clipped(outputs.logprobs, x.advantages)


def megatron(x: Inputs, hidden: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (hidden @ x.weight.t()).float()
    return clipped(
        -vocab_parallel_cross_entropy(logits[:, None], x.targets[:, None])[:, 0], x.advantages
    )


def liger(x: Inputs, hidden: Tensor) -> Tensor:
    from liger_kernel.chunked_loss.fused_linear_ppo import (
        _ChunkedSelectiveLogProbFunction as Chunked,
    )

    return clipped(Chunked.apply(hidden, x.weight, x.targets, None, 1.0, 4096), x.advantages)


def naive(x: Inputs, hidden: Tensor) -> Tensor:
    logp = torch.log_softmax((hidden @ x.weight.t()).float(), -1)
    return clipped(logp.gather(-1, x.targets[:, None])[:, 0], x.advantages)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that ``call`` has allocated at a time, as torch's CPU allocator counts them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()))
    )


def equal(ours: list[Tensor], others: list[Tensor], terms: float, tolerance: float) -> bool:
    """Gradients relative to their largest entry, the loss to the sum of its terms' sizes, of which
    little is left.
    """
    scales = [terms, *(float(gradient.abs().max()) for gradient in others[1:])]
    return all(
        (a - b).abs().max() <= tolerance * s for a, b, s in zip(ours, others, scales, strict=True)
    )


def measurements(
    rows: int = 1024,
    vocabulary: int = 151_936,
    hidden: int = 256,
    dtype: str = "fp32",
    rounds: int = 5,
) -> Iterator[Measurement]:
    torch.set_num_threads(1)
    if QUICK:
        rows, vocabulary, rounds = 64, 2048, 1
    if not dist.is_initialized():
        os.environ |= {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
            "RANK": "0",
            "WORLD_SIZE": "1",
        }
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x = Inputs(rows, vocabulary, hidden, kind)
    alternatives = {
        "ours": one_pass,
        "two_passes": two_passes,
        "megatron": megatron,
        "naive": naive,
    }
    shape = f"{rows} rows, {vocabulary} tokens, {hidden} wide, {dtype}"
    try:
        import liger_kernel.chunked_loss  # noqa: F401

        alternatives["liger"] = liger
    except ImportError:
        yield absent(
            f"output layer, memory ({shape})",
            "bytes",
            LIGER,
            not_installed("--no-deps liger-kernel==0.8.5"),
        )
    calls = {name: (lambda total=total: x.run(total)) for name, total in alternatives.items()}
    turns = in_turns(rounds, **calls)
    memory = {}
    for name, call in calls.items():
        x.weight.grad = None  # not to be freed meanwhile
        memory[name] = peak_bytes(call)
    tolerance = 3e-6 if kind == torch.float32 else 3e-2
    results = {name: turn.result for name, turn in turns.items()}
    terms = float(x.advantages.abs().sum())
    same = {
        name: equal(results["ours"], result, terms, tolerance) for name, result in results.items()
    }
    for name, other_is, goal in (
        ("megatron", MEGATRON, 1.15),
        ("liger", LIGER, None),
        ("naive", NAIVE, None),
    ):
        if name in turns:
            what = f"output layer, time ({shape})"
            yield timed(
                what, turns["ours"], turns[name], other_is, how=min, goal=goal, same=same[name]
            )
    what = f"output layer in two passes, time ({shape})"
    yield timed(
        what, turns["two_passes"], turns["megatron"], MEGATRON, how=min, same=same["two_passes"]
    )
    for name, other_is in (("liger", LIGER), ("megatron", MEGATRON), ("naive", NAIVE)):
        if name in turns:
            what, numbers = (f"output layer, memory ({shape})", (memory["ours"], memory[name]))
            yield Measurement(what, *numbers, "bytes", other_is, goal=1.0, same=same[name])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rows", 1024), ("vocabulary", 151_936), ("hidden", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    for m in measurements(**vars(parser.parse_args())):
        ratio = f"{m.ratio:.2f}" if m.ratio is not None else m.reason
        print(
            f"{m.name} against {m.other_is}: {m.ours} to {m.other} {m.unit}, ratio {ratio}, same: "
            f"{m.same}"
        )


if __name__ == "__main__":
    main()
