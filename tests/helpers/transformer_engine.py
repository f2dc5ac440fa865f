"""The stand-in for Transformer Engine (``megatron_dcpo/rehearsal/stand_in``) in processes of their
own.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from importlib.metadata import version
from typing import Any

import pytest

from tests.helpers.paths import REPOSITORY

STAND_IN = REPOSITORY / "megatron_dcpo/rehearsal/stand_in"
VARIABLE = "DCPO_TEST_TRANSFORMER_ENGINE"


def environment() -> dict[str, str]:
    """For processes that are to find the stand-in, and believe that its kernels run here. Skips the
    test with another Megatron-core than the one that Transformer Engine 2.11 is for.
    """
    if not (release := version("megatron-core")).startswith("0.16."):
        pytest.skip(
            "the stand-in is of Transformer Engine 2.11, which Megatron-core 0.16 asks for, and "
            f"not {release}"
        )
    path = os.pathsep.join([str(STAND_IN), str(REPOSITORY)])
    return {"PYTHONPATH": path, VARIABLE: "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def pretend() -> None:
    """In such a process: the capabilities of the CPU, Transformer Engine's layers, and updates of
    which its kernel of Adam would read the numbers.
    """
    if not os.environ.get(VARIABLE):
        return
    from transformer_engine.pytorch.optimizers import refuse_misread_update

    from megatron_dcpo.runtime import device
    from megatron_dcpo.runtime.megatron_on_cpu import FusedAdam

    device._CPU = dataclasses.replace(device._CPU, transformer_engine=True)
    step = FusedAdam.step

    @functools.wraps(step)
    def checked(optimizer: FusedAdam, *arguments: Any) -> None:
        step(optimizer, *arguments)
        refuse_misread_update(optimizer)

    FusedAdam.step = checked  # type: ignore[method-assign]
