"""One rank: log-probs of the next token by vLLM, with an adapter in PEFT's format on the model that
it was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dcpo.rollout.vllm_engine import EngineOptions, VllmEngine


def run(options: dict[str, Any]) -> Any:
    more = {"enable_lora": True, "max_lora_rank": 8, "kv_cache_memory_bytes": 1 << 26}
    engine = VllmEngine(
        Path(options["model"]),
        EngineOptions("fp32", max_model_len=128, max_num_seqs=4, arguments=more),
    )
    from vllm import SamplingParams  # importable once an engine has set its environment
    from vllm.lora.request import LoRARequest

    adapter, token_ids = Path(options["adapter"]), options["token_ids"]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprob_token_ids=token_ids,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in options["sequences"]]
    request = LoRARequest(adapter.name, 1, str(adapter.resolve()))
    outputs = engine.llm.generate(prompts, params, use_tqdm=False, lora_request=request)
    rows = [output.outputs[0].logprobs[0] for output in outputs]
    engine.close()
    return [[row[token].logprob for token in token_ids] for row in rows]
