"""The architecture of a model that is not on this machine, from the public ``config.json`` files in
``models/``, or from the hub.
"""

from __future__ import annotations

import functools
from pathlib import Path

from megatron_dcpo.architectures.config_json import HUB_NAME, Architecture, read_architecture
from megatron_dcpo.errors import UserError, one_line

MODELS = Path(__file__).with_name("models")


def architecture_of(path: str) -> Architecture:
    """Return the architecture of a model directory, or of the public model of that name. Raises
    :class:`UserError` if there is neither, or if the weights in the directory are not those that
    its ``config.json`` describes.
    """
    if Path(path).is_dir() or not HUB_NAME.fullmatch(path) or Path(path).parent.is_dir():
        arch = read_architecture(path)
        if any(Path(path).glob("*.safetensors")):
            from megatron_dcpo.weights.hf_checkpoint import HFReader  # imports torch

            HFReader(path, arch).check(arch)
        return arch
    if (MODELS / path).is_dir():
        return read_architecture(MODELS / path)
    return read_architecture(_fetched(path))


@functools.cache
def _fetched(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except (OSError, ValueError) as error:  # from the network, the hub, or its rules for names
        known = sorted(
            file.parent.relative_to(MODELS).as_posix() for file in MODELS.glob("*/*/config.json")
        )
        raise UserError(
            f"model.path={name} is not a directory, and its config.json cannot be had from the hub "
            f"({one_line(error, 150)}); put that file into {name}/, or use a model that is known "
            f"here: {', '.join(known)}"
        ) from None
