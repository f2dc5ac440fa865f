"""One rank: sample long responses by vLLM with a cache of the given sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.rollout.engine import SamplingConfig
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.types import Prompt


def run(options: dict[str, Any]) -> Any:
    rng, found = np.random.default_rng(0), []
    prompts = [
        Prompt(str(i), (), tuple(rng.integers(1, 200, 5).tolist()), "", "") for i in range(8)
    ]
    for cache in options["caches"]:
        sizes = EngineOptions(
            dtype="fp32",
            max_model_len=256,
            max_num_seqs=8,
            arguments={"kv_cache_memory_bytes": cache},
        )
        engine = VllmEngine(Path(options["model"]), sizes)
        engine.eos_token_ids = ()  # nothing ends early
        responses = engine.generate(prompts, SamplingConfig(max_tokens=200))
        found.append(
            [engine.slot_steps.preemptions, [response.token_ids.tolist() for response in responses]]
        )
        engine.close()
    return found
