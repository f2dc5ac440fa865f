"""The engine in this process: vLLM or transformers, and which of them ``auto`` is here."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.architectures.config_json import check_model_dir, is_known, read_architecture
from megatron_dcpo.architectures.keys import check_unquantized
from megatron_dcpo.errors import UserError, pip_install
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.weights.hf_checkpoint import HFReader

logger = logging.getLogger(__name__)

_VLLM = "megatron_dcpo.rollout.vllm_engine:VllmEngine"
_TRANSFORMERS = "megatron_dcpo.rollout.transformers_engine:TransformersEngine"
# removed after vLLM 0.23
_NOT_IN_VLLM = ("dots1",)
# run by transformers' modules, whose gate_up_proj takes no gate_proj and up_proj
_FUSED_IN_VLLM = ("glm",)
# no released model of it does
_NOT_TIED_IN_VLLM = ("glm4_moe",)


def build_local_engine(choice: str, model_dir: str | Path, options: EngineOptions) -> Engine:
    """Return an engine in this process. ``choice`` is ``auto``, ``vllm`` or ``transformers``.

    The transformers engine uses ``dtype``, ``max_num_seqs``, ``head_dtype`` and ``record_experts``
    of the options and samples on one rank. Raises :class:`UserError` if the model or the chosen
    engine cannot be used.
    """
    if choose_engine(choice, model_dir) == "vllm":
        return load_part(_VLLM)(model_dir, options)
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
    return load_part(_TRANSFORMERS).from_pretrained(
        model_dir=model_dir,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        head_dtype=options.head_dtype,
        record_experts=options.record_experts,
    )


def check_sampled_model(model_dir: str | Path) -> int:
    """Return the number of embeddings of a model that is sampled and not trained. Raises
    :class:`UserError` if it is not the model that its ``config.json`` describes, as far as this is
    known: an architecture that only transformers has is trusted to it.
    """
    check_model_dir(model_dir)
    path = Path(model_dir) / "config.json"
    config = read_json_object(path)
    check_unquantized(config, str(path))
    if is_known(config):
        arch = read_architecture(model_dir)
        HFReader(model_dir, arch).check(arch)
        return arch.vocab_size
    size = config.get("vocab_size")
    if size is None and isinstance(config.get("text_config"), dict):
        size = config["text_config"].get("vocab_size")
    if type(size) is not int:
        raise UserError(f"{path}: vocab_size must be a count, not {size!r:.40}")
    return size


def choose_engine(choice: str, model_dir: str | Path) -> Literal["vllm", "transformers"]:
    """Return the engine's name: ``auto`` takes vLLM on a GPU if it is installed and can run the
    model, and says so when it cannot. Without a GPU transformers samples as fast, starts sooner and
    takes less memory (docs/engines.md).

    Raises :class:`UserError` when vLLM is asked for and cannot be used.
    """
    if choice == "transformers" or (choice == "auto" and not capabilities().separate_memory):
        return "transformers"
    reason = (
        f"vLLM is not installed (on a GPU: {pip_install('vllm')}; without one: make setup-engine)"
    )
    if find_spec("vllm") is not None:
        try:
            reason = unsupported(read_architecture(model_dir))
        except UserError as error:  # a model of another kind, which transformers may know
            reason = str(error)
    if not reason:
        return "vllm"
    if choice == "vllm":
        raise UserError(
            f"the vLLM engine cannot be used: {reason}; take the transformers engine instead"
        )
    logger.info("engine auto: transformers, because %s", reason)
    return "transformers"


def unsupported(arch: Architecture) -> str:
    """Return why vLLM, installed, cannot run ``arch`` here; empty if it can. Does not import vLLM,
    which takes seconds.
    """
    if arch.name in _NOT_IN_VLLM:
        return f"vLLM has no {arch.name} any more"
    if arch.name in _FUSED_IN_VLLM:
        return f"vLLM runs {arch.name} by a module that takes no update of gate or up alone"
    if arch.name in _NOT_TIED_IN_VLLM and arch.tied_embeddings:
        return f"vLLM does not tie the embeddings of {arch.name}"
    multiple = capabilities().expert_hidden_multiple
    if arch.num_experts and arch.hidden_size % multiple:
        return (
            f"vLLM's experts need a hidden_size that is a multiple of {multiple} (it is "
            f"{arch.hidden_size})"
        )
    sizes = capabilities().attention_head_sizes
    if sizes is not None and arch.kv_channels not in sizes:
        return f"vLLM's attention on the CPU has no head_dim {arch.kv_channels} (it has {sizes})"
    return ""
