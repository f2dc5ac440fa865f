"""Engines, which sample responses. No other subpackage knows the generation of transformers and
vLLM.

What is named here is imported when it is asked for: a server is evaluated without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dcpo.rollout.engine import Engine, EngineError, choose_engine
    from megatron_dcpo.rollout.local_engine import build_local_engine
    from megatron_dcpo.rollout.sampling import Samples, SamplingConfig
    from megatron_dcpo.rollout.tokens import load_tokenizer
    from megatron_dcpo.rollout.transformers_engine import TransformersEngine
    from megatron_dcpo.rollout.vllm_host import VllmOptions

__all__ = [
    "Engine",
    "EngineError",
    "Samples",
    "SamplingConfig",
    "TransformersEngine",
    "VllmOptions",
    "build_local_engine",
    "choose_engine",
    "load_tokenizer",
]

_MODULES = {
    "Engine": "engine",
    "EngineError": "engine",
    "Samples": "sampling",
    "SamplingConfig": "sampling",
    "TransformersEngine": "transformers_engine",
    "VllmOptions": "vllm_host",
    "build_local_engine": "local_engine",
    "choose_engine": "engine",
    "load_tokenizer": "tokens",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
