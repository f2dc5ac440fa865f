"""Engines: what samples responses. The only room that knows transformers' and vLLM's generation."""

from megatron_dcpo.rollout.engine import Engine, EngineError, SamplingConfig, choose_engine
from megatron_dcpo.rollout.transformers_engine import TransformersEngine

__all__ = ["Engine", "EngineError", "SamplingConfig", "TransformersEngine", "choose_engine"]
