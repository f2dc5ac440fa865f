"""Engines, which sample responses. No other subpackage knows the generation of transformers and
vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.token_bytes import check_ids
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    Samples,
    SamplingConfig,
    choose_engine,
)
from megatron_dcpo.rollout.function import RolloutContext, Transcript
from megatron_dcpo.rollout.transformers_engine import (
    TransformersEngine,
    auto_class,
    redirect_transformers_logging,
)
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.rollout.vllm_host import VllmOptions
from megatron_dcpo.runtime.text import read_json_object

__all__ = [
    "Engine",
    "EngineError",
    "RolloutContext",
    "Samples",
    "SamplingConfig",
    "Transcript",
    "TransformersEngine",
    "VllmOptions",
    "build_local_engine",
    "choose_engine",
    "load_tokenizer",
]

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tokenizer_config.json")


def build_local_engine(
    choice: str, model_dir: str | Path, options: VllmOptions
) -> Engine:
    """Return an engine in this process. ``choice`` is ``auto``, ``vllm`` or ``transformers``.

    The transformers engine uses ``dtype``, ``max_num_seqs``, ``head_dtype`` and ``record_experts``
    of the options and samples on one rank. Raises :class:`UserError` if the model or the chosen
    engine cannot be used.
    """
    if choose_engine(choice, model_dir) == "vllm":
        return VllmEngine(model_dir, options)
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


def load_tokenizer(model_dir: str | Path) -> Any:  # noqa: ANN401 - transformers' tokenizer
    """Load the tokenizer of a checkpoint directory. Raises :class:`UserError` if there is none, or
    only an unusable one.
    """
    redirect_transformers_logging()
    directory = Path(model_dir)
    spec = directory / "tokenizer.json"
    if spec.is_file():
        # The library would allocate memory for the largest id.
        check_ids(read_json_object(spec), str(spec))
    elif not any((directory / name).is_file() for name in _OTHER_TOKENIZERS):
        # The library would make a tokenizer with a single token.
        raise UserError(
            f"{model_dir} has no tokenizer.json; put the files of the model's tokenizer there"
        )
    try:
        return auto_class("AutoTokenizer").from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # the tokenizers library raises plain Exception, readers anything
        raise UserError(
            f"no usable tokenizer in {model_dir} ({one_line(error, 200)})"
        ) from None
