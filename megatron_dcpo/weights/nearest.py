"""Of an architecture that is not known here: which known one is nearest, and what differs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import one_line
from megatron_dcpo.weights.config_keys import Keys, keys_without_place
from megatron_dcpo.weights.decoder import Architecture
from megatron_dcpo.weights.table import stored_shapes

LONGEST = 400
# of the line, however long the file's path is
_AT_LEAST = 340
# a tensor of a layer, whatever the modules around it are called
_OF_LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)+\d+\.(.+)")
_SUFFIX = "ForCausalLM"
# which layers have none
_DENSE_LAYERS = ("first_k_dense_replace", "mlp_only_layers")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NUMBERS_OF_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
# of a kind; a line has no room for more
_MOST_NAMES = 40


@dataclass(frozen=True)
class Family:
    """A known architecture: its keys, and its ``smallest`` model, for the names of tensors.
    ``attention_bias`` is also about the output projection if it ``biases_the_output``.
    """

    name: str
    keys: Keys
    smallest: Architecture
    biases_the_output: bool


@dataclass(frozen=True)
class Difference:
    """Between a model and the architecture ``known``: the model's ``keys`` and ``tensors`` (of any
    layer) that have no place there, and what is there and the model lacks.
    """

    known: str
    keys: tuple[str, ...]
    tensors: tuple[str, ...]
    lacking: tuple[str, ...]
    weights: bool

    @property
    def size(self) -> int:
        return len(self.keys) + len(self.tensors) + len(self.lacking)


def unknown_architecture(
    config: Mapping[str, Any],
    name: str,
    source: str,
    model_dir: Path | None,
    families: Sequence[Family],
) -> str:
    """Return the line of an error for a ``config.json``, read from ``source``, whose architecture
    ``name`` is not known. It has at most 400 characters, unless the path is long. Weights in
    ``model_dir`` are looked at if there are any.
    """
    difference = nearest_architecture(config, name, model_dir, families)
    known = ", ".join(family.name.removesuffix(_SUFFIX) for family in families)
    start = (
        f"architecture {one_line(name, 60)} is not supported; known: "
        f"{known} ({_SUFFIX}); nearest is {difference.known}, "
    )
    room = max(_AT_LEAST, LONGEST - len(source) - len(": ")) - len(start)
    return f"{source}: {start}{_told(difference, room)}"


def nearest_architecture(
    config: Mapping[str, Any], name: str, model_dir: Path | None, families: Sequence[Family]
) -> Difference:
    """Return what differs from the known architecture from which least differs; of several the one
    with the most similar name.
    """
    tensors = _of_any_layer(model_dir)
    differences = [_difference(family, config, tensors) for family in families]

    def rank(difference: Difference) -> tuple[int, float]:
        similar = difflib.SequenceMatcher(None, difference.known, name).ratio()
        return difference.size, -similar

    return min(differences, key=rank)


def _difference(family: Family, config: Mapping[str, Any], tensors: frozenset[str]) -> Difference:
    lacking = [key for key in family.keys.spelled_out if key not in config]
    counts_experts = config.keys() & _NUMBERS_OF_EXPERTS
    if family.smallest.num_experts and not counts_experts:
        lacking.append("num_experts")
    without_place: list[str] = []
    if tensors:
        expected = _without_number(stored_shapes(_as_configured(family, config)))
        without_place = sorted(tensors - expected)
        lacking += sorted(expected - tensors)
    return Difference(
        known=family.name,
        keys=keys_without_place(config, family.keys),
        tensors=tuple(without_place),
        lacking=tuple(lacking),
        weights=bool(tensors),
    )


def _as_configured(family: Family, config: Mapping[str, Any]) -> Architecture:
    """Return the smallest model with the biases, norms and layers without experts that ``config``
    asks for, if the family knows the key.
    """

    def asks_for(switch: str) -> bool:
        has_place = not keys_without_place({switch: True}, family.keys)
        return config.get(switch) is True and has_place

    arch = family.smallest
    if asks_for("attention_bias") and not arch.qkv_bias:
        arch = replace(arch, qkv_bias=True, output_bias=family.biases_the_output)
    if asks_for("mlp_bias"):
        arch = replace(arch, mlp_bias=True)
    if asks_for("use_qk_norm"):
        arch = replace(arch, qk_layernorm=True)
    if arch.num_experts and any(config.get(key) for key in _DENSE_LAYERS):
        arch = replace(arch, num_layers=2, dense_layers=(0,), dense_ffn_hidden_size=1)
    return arch


def _of_any_layer(model_dir: Path | None) -> frozenset[str]:
    """Return the tensors of the layers in a model directory, without the prefix of the layer;
    nothing if there are none that can be read.
    """
    from safetensors import SafetensorError, safe_open

    if model_dir is None:
        return frozenset()
    names: list[str] = []
    try:
        for path in model_dir.glob("*.safetensors"):
            with safe_open(path, framework="np") as file:
                names += file.keys()
    except (OSError, SafetensorError):
        return frozenset()
    return _without_number(names)


def _without_number(names: Sequence[str] | Mapping[str, object]) -> frozenset[str]:
    """Return the names of all layers without their prefix; experts have one name for all."""
    found = set()
    for name in names:
        match = _OF_LAYER.fullmatch(name)
        if match and not name.endswith(".inv_freq"):
            found.add(_EXPERT.sub(".experts.*.", f".{match[1]}")[1:])
    return frozenset(found)


def _told(difference: Difference, room: int) -> str:
    """Return what differs, with as many names as there is room for, of every kind about as many."""
    kinds = (difference.keys, difference.tensors, difference.lacking)
    named = [0, 0, 0]
    told = _sentence(difference, named)
    for more in range(_MOST_NAMES * len(kinds)):
        kind = more % len(kinds)
        if named[kind] == len(kinds[kind]):
            continue
        named[kind] += 1
        longer = _sentence(difference, named)
        if len(longer) > room:
            named[kind] -= 1
        else:
            told = longer
    return told


def _sentence(difference: Difference, named: Sequence[int]) -> str:
    """Return what differs; ``named`` says how many names of each kind."""
    without_place = []
    if difference.keys:
        without_place.append(_listed("key", difference.keys, named[0]))
    if difference.tensors:
        without_place.append(_listed("layer tensor", difference.tensors, named[1]))
    if without_place:
        told = f"which has no place for the {' and the '.join(without_place)}"
    elif difference.weights:
        told = "which has a place for all keys and tensors"
    else:
        told = "which has a place for all keys (there are no weights to compare)"
    if difference.lacking:
        told += f"; without its {_listed('name', difference.lacking, named[2])}"
    return told


def _listed(kind: str, names: Sequence[str], named: int) -> str:
    """Return the first names and how many more there are."""
    if named == 0:
        return f"{len(names)} {kind}{'s' if len(names) > 1 else ''}"
    shown = [one_line(name.removesuffix(".weight"), 60) for name in names[:named]]
    listed = ", ".join(shown)
    if len(names) > named:
        listed += f" and {len(names) - named} more"
    if kind == "name":
        return listed
    return f"{kind}{'s' if len(names) > 1 else ''} {listed}"
