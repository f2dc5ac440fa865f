"""One rank: what vLLM's sampler draws, and the log-probs that it reports, against transformers'
probabilities in fp32. Written: both, what transformers in the same type differs by, and how vLLM
ran.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.types import Prompt
from tests.distributed.cases.common import initialize_layout, parallel_config

TEMPERATURE = 0.7


def of_transformers(model: str, dtype: torch.dtype, prompt: list[int]) -> np.ndarray:
    """Return the log-probs of the first token after the prompt, fp32 [V]."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.no_grad():
        logits = network(torch.tensor([prompt])).logits[0, -1].float()
    return torch.log_softmax(logits / TEMPERATURE, -1).numpy()


def run(options: dict[str, Any]) -> dict[str, Any]:
    initialize_layout(parallel_config({}))
    prompt, draws = options["prompt"], options["draws"]
    settings = EngineOptions(
        dtype=options["dtype"],
        max_model_len=192,
        max_num_seqs=256,
        arguments={"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True},
    )
    engine = VllmEngine(options["model"], settings)
    config = engine.llm.llm_engine.vllm_config
    sampling = SamplingConfig(n=draws, temperature=TEMPERATURE, max_tokens=2, seed=3)
    responses = engine.generate([Prompt("p", (), tuple(prompt), "", "")], sampling)
    engine.close()
    expected = of_transformers(options["model"], torch.float32, prompt)
    rounded = of_transformers(options["model"], torch_dtype(options["dtype"]), prompt)
    firsts = np.array([response.token_ids[0] for response in responses])
    reported = np.array([response.logprobs[0] for response in responses])
    own = expected.astype(np.float64)
    for token in np.unique(firsts):
        own[token] = reported[firsts == token].mean()
    return {
        "second_runner": bool(config.use_v2_model_runner),
        "in_flight": int(config.max_concurrent_batches),
        "expected": np.exp(own).tolist(),
        "drawn": np.bincount(firsts, minlength=len(expected)).tolist(),
        "largest": float(np.abs(reported - expected[firsts]).max()),
        "floor": float(np.abs(rounded - expected)[firsts].max()),
    }
