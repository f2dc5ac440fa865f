"""One rank: log-probs of the next token by vLLM, with an adapter in PEFT's format on the model that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dcpo.rollout.vllm_engine import VllmEngine, VllmOptions


def run(options: dict[str, Any]) -> Any:
    rank = options.get("rank", 4)
    sizes = VllmOptions(
        dtype="fp32", max_model_len=128, max_num_seqs=4, adapter_rank=rank, kv_cache_memory_bytes=1 << 26
    )
    engine = VllmEngine(Path(options["model"]), sizes)
    return engine.next_logprobs(Path(options["adapter"]), options["sequences"], options["token_ids"]).tolist()
