import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint


class CudaRNGStatesTracker:
    """Megatron's own tracker is used; this is a base class only."""


def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Recompute ``function`` in the backward pass."""
    for name in (
        "distribute_saved_activations",
        "get_rng_state_tracker",
        "tp_group",
        "use_reentrant",
    ):
        options.pop(name, None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


@contextlib.contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Concerns the scales of eight-bit recipes."""
    yield
