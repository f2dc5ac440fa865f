"""The one table of element types: torch's and Hugging Face's name, safetensors' code, bytes per
element, our option.

Importable without torch: planning and the command line ask for names and sizes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# torch's name (Hugging Face's config.json has the same) -> (safetensors' code, bytes per element)
_TABLE: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
# Megatron's names, those of our options, -> torch's
_OPTIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

FLOATS = tuple(_OPTIONS.values())  # what the weights of a model may be
SAFETENSORS_CODES = {name: code for name, (code, _) in _TABLE.items()}
FROM_SAFETENSORS = {code: name for name, code in SAFETENSORS_CODES.items()}


def dtype_name(option: str) -> str:
    """Return the name in torch: ``bf16`` -> ``bfloat16``; torch's own names stay as they are."""
    return _OPTIONS.get(option, option)


def dtype_bytes(name: str) -> int:
    """Return the bytes per element of a type by its name, ours or torch's. Raises :class:`KeyError`
    for an unknown one.
    """
    return _TABLE[dtype_name(name)][1]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type by its name, ours or torch's."""
    import torch

    dtype = getattr(torch, dtype_name(name))
    assert isinstance(dtype, torch.dtype), name
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the type's name: ``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
