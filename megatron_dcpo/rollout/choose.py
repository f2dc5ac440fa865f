"""Which engine ``auto`` means on this machine, for this model."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_dcpo import runtime
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import Architecture, read_architecture

logger = logging.getLogger(__name__)

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what vLLM's CPU attention has kernels for


def choose_engine(choice: str, model_dir: str | Path) -> Literal["vllm", "transformers"]:
    """``auto`` takes vLLM where it is installed and can run the model, and says so when it cannot.

    Raises :class:`UserError` when vLLM is asked for and cannot be used.
    """
    if choice == "transformers":
        return "transformers"
    reason = "vLLM is not installed (on a GPU: pip install 'megatron-dcpo[vllm]'; without one: make setup-engine)"
    if find_spec("vllm") is not None:
        try:
            reason = unsupported(read_architecture(model_dir))
        except UserError as error:  # a model of another kind, which transformers may know
            reason = str(error)
    elif choice == "auto":
        return "transformers"
    if not reason:
        return "vllm"
    if choice == "vllm":
        raise UserError(f"the vLLM engine cannot be used: {reason}; take the transformers engine instead")
    logger.info("engine auto: transformers, because %s", reason)
    return "transformers"


def unsupported(arch: Architecture) -> str:
    """Why vLLM, installed, cannot run ``arch`` here; empty if it can. Does not import vLLM, which takes seconds."""
    if not runtime.has_cuda() and arch.kv_channels not in CPU_HEAD_DIMS:
        return f"vLLM's attention on the CPU has no head_dim {arch.kv_channels} (it has {CPU_HEAD_DIMS})"
    return ""
