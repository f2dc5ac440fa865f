"""The engine in this process: vLLM or transformers."""

from __future__ import annotations

from pathlib import Path

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine import Engine, choose_engine
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.rollout.vllm_host import VllmOptions


def build_local_engine(choice: str, model_dir: str | Path, options: VllmOptions) -> Engine:
    """Return an engine in this process. ``choice`` is ``auto``, ``vllm`` or ``transformers``.

    The transformers engine uses ``dtype``, ``max_num_seqs``, ``head_dtype`` and ``record_experts``
    of the options and samples on one rank. Raises :class:`UserError` if the model or the chosen
    engine cannot be used.
    """
    if choose_engine(choice, model_dir) == "vllm":
        return VllmEngine(model_dir, options)
    if options.quantization:
        raise UserError(
            f"rollout.vllm.quantization={options.quantization} needs vLLM, which cannot be used "
            "here; remove it"
        )
    size = options.tensor_model_parallel_size
    if size > 1:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} needs vLLM, which cannot be used here"
        )
    return TransformersEngine.from_pretrained(
        model_dir=model_dir,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        head_dtype=options.head_dtype,
        record_experts=options.record_experts,
    )
