"""How often a micro-batch's loss and statistics make the host wait for the device.

A stand-in for the device's stream: on CUDA these operators read a number back before they return,
and so does an index that is a mask (``nonzero``). What comes from the host goes through
``to_device`` alone, which waits for nothing.
"""

from collections import Counter

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dcpo.objectives.policy_loss import clipped_policy_loss
from megatron_dcpo.policy import batching
from megatron_dcpo.policy.batching import collate
from megatron_dcpo.training import mismatch
from megatron_dcpo.types import TokenOutputs
from tests.helpers.objective_cases import golden_judgements, objective, samples_of

WAITING = {"nonzero", "bincount", "_local_scalar_dense", "masked_select", "lift_fresh"}


class Stream(TorchDispatchMode):
    """Counts what waits. ``lift_fresh``: a tensor made of numbers of the host."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = (
            [i for i in args[1] if i is not None and i.dtype == torch.bool]
            if name == "index"
            else []
        )
        if name in WAITING or masks:
            self.waits[name] += 1
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_waits_three_times(monkeypatch):
    """Once for the places of each block's tokens, and in the end for all numbers at once. It was 32
    times.
    """
    uploaded = []
    real = batching.to_device
    for module in (batching, mismatch):

        def counted(values, dtype=None):
            uploaded.append(np.shape(values))
            with torch.utils._python_dispatch._disable_current_modes():
                return real(values, dtype)

        monkeypatch.setattr(module, "to_device", counted)
    method = objective()
    samples = method.score(samples_of(golden_judgements()))
    with Stream() as stream:
        (batch,) = collate(samples, [range(len(samples))], packing=True)
        logprobs = torch.randn(len(batch.targets))
        outputs = TokenOutputs(logprobs, logprobs * 0)
        losses, statistics = clipped_policy_loss(batch, outputs, method.options)
        statistics |= {
            "loss": losses.detach().sum(),
            **mismatch.mismatch_statistics(batch, outputs),
        }
        values = torch.stack([value.double() for value in statistics.values()])
    assert len(values) > 30
    assert stream.waits == {"nonzero": 2}, stream.waits
    assert len(uploaded) >= 10
