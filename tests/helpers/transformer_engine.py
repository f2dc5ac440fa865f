"""The stand-in for Transformer Engine (``tests/stand_in``) in processes of their own."""

from __future__ import annotations

import dataclasses
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY

STAND_IN = Path(__file__).parents[1] / "stand_in"
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
    """In such a process: the capabilities of the CPU, and Transformer Engine's layers."""
    if os.environ.get(VARIABLE):
        from megatron_dcpo.runtime import device

        device._CPU = dataclasses.replace(device._CPU, transformer_engine=True)
