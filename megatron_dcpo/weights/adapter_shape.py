"""Which linear layers a low-rank adapter is added to, with what rank and scale: a new one by
``model.adapter``, or one on disk in PEFT's format, of which everything that changes what it
computes is read or refused by name. Nothing here needs torch; ``peft_adapter.py`` reads and writes
the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import AdapterConfig
from megatron_dcpo.config.sections import Projection
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.weights.table import adapted, hf_shapes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_PAIR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# What adds something else to the model than scale * B A, by the value that adds nothing.
_REFUSED: Mapping[str, Any] = {
    "use_dora": False,
    "use_qalora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "fan_in_fan_out": False,
    "megatron_config": None,
}
# What says how an adapter was made, or where, and nothing about what it computes. The tensors name
# the modules.
_WITHOUT_INFLUENCE = frozenset(
    {
        "peft_type",
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "runtime_config",
        "ensure_weight_tying",
        "megatron_core",
        "qalora_group_size",
        # how the factors began
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
    }
)
# Ways to begin that change the model's own weights, which the adapter is then relative to.
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
_READ = frozenset(
    {
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "lora_dropout",  # said when the adapter is trained on
    }
)
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
# of a new adapter
RANK = 16
ALPHA = 32.0


@dataclass(frozen=True)
class AdapterShape:
    """Rank and scale of the pair of each adapted module (``model.layers.0.self_attn.q_proj``)."""

    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    dropout: float = 0.0  # that it was trained with elsewhere

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors to which a product is added."""
        return tuple(f"{module}.weight" for module in self.ranks)

    @property
    def scale(self) -> float | None:
        """Return the scale of all pairs; None if they differ."""
        scales = set(self.scales.values())
        return scales.pop() if len(scales) == 1 else None


def adapter_shape(config: AdapterConfig, arch: Architecture) -> AdapterShape:
    """Return the shape of ``model.adapter``: that of the adapter at its path, or of a new one.
    Raises :class:`UserError`.
    """
    check_adaptable(arch)
    if config.path:
        return read_shape(Path(config.path), arch)
    targets = config.targets or PROJECTIONS
    rank = config.rank or RANK
    alpha = config.alpha or ALPHA
    first = _first_layer(config.layers, arch)
    modules = [
        name.removesuffix(".weight") for name in adapted(arch, targets) if layer_of(name) >= first
    ]
    return AdapterShape(
        ranks=dict.fromkeys(modules, rank), scales=dict.fromkeys(modules, alpha / rank)
    )


def _first_layer(layers: str | None, arch: Architecture) -> int:
    """Return the number of the first adapted layer, counted from 0, by ``model.adapter.layers``."""
    if layers is None:
        return 0
    count = int(layers.removeprefix("last "))
    if count > arch.num_layers:
        raise UserError(
            f"model.adapter.layers={layers}: the model has {arch.num_layers} layers; name as many "
            "at most"
        )
    return arch.num_layers - count


def layer_of(module: str) -> int:
    """Return the number of the layer in the name of a module or tensor (``model.layers.3.mlp``)."""
    return int(module.split(".")[2])


def described(config: AdapterConfig) -> dict[str, Any]:
    """Return the options of ``model.adapter``, with the values of those that are not set."""
    if config.path:
        return {"rank": None, "alpha": None, "targets": None, "layers": None, "path": config.path}
    return {
        "rank": config.rank or RANK,
        "alpha": config.alpha or ALPHA,
        "targets": tuple(config.targets or PROJECTIONS),
        "layers": config.layers,
        "path": "",
    }


# --------------------------------------------------------------------------------------- reading
def read_shape(directory: Path, arch: Architecture) -> AdapterShape:
    """Return the shape of the adapter in ``directory``. Raises :class:`UserError` for what is no
    adapter, for one that adds something else than scale * B A, and for one of another model.
    """
    check_adaptable(arch)
    path = directory / CONFIG
    factor_shapes = _shapes_of_factors(directory)
    if not path.is_file():
        raise UserError(f"{directory}: {CONFIG} is missing; copy the whole directory")
    config = read_json_object(path)
    _check_config(config, path)
    known = hf_shapes(arch)
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    # in the model's order, whatever the file's is
    for name in adapted(arch, PROJECTIONS):
        module = name.removesuffix(".weight")
        if module not in factor_shapes:
            continue
        rank = _pattern_of(module, config.get("rank_pattern"), config["r"], path)
        _check_factors(directory, module, factor_shapes.pop(module), rank, known[name])
        alpha = _pattern_of(module, config.get("alpha_pattern"), config["lora_alpha"], path)
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        ranks[module] = int(rank)
        scales[module] = alpha / divisor
    for module in factor_shapes:
        raise UserError(
            f"{directory}: {module} is no linear layer of the model that can be adapted here "
            f"({', '.join(PROJECTIONS)}); train the adapter without it"
        )
    if not ranks:
        raise UserError(f"{directory}: the adapter holds no factors")
    dropout = float(config.get("lora_dropout") or 0.0)
    return AdapterShape(ranks=ranks, scales=scales, dropout=dropout)


def check_adaptable(arch: Architecture) -> None:
    """Raise :class:`UserError` if PEFT would have other projections than the weight table."""
    if arch.fused_projections:
        raise UserError(
            f"model.adapter is not supported for {arch.name}, whose checkpoints hold several "
            f"projections in one tensor ({', '.join(arch.fused_projections)}); train all parameters"
        )


def factor_names(module: str) -> tuple[str, str]:
    """Return the names of the factors A and B of a module in a file of PEFT's."""
    return (f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight")


def _shapes_of_factors(directory: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the factors A and B, by module. Raises :class:`UserError` for a tensor
    that is neither.
    """
    from safetensors import SafetensorError, safe_open

    path = directory / WEIGHTS
    if not path.is_file():
        raise UserError(
            f"{directory}: no adapter of PEFT's ({WEIGHTS} and {CONFIG} are expected); an older "
            "adapter_model.bin is converted by loading and saving it with PEFT"
        )
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                match = _PAIR.fullmatch(name)
                if match is None:
                    raise UserError(
                        f"{path}: {name} is no factor lora_A or lora_B of a linear layer; train "
                        "the adapter without it"
                    )
                shape = tuple(file.get_slice(name).get_shape())
                found.setdefault(match["module"], {})[match["factor"]] = shape
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: not a readable safetensors file ({one_line(error, 200)})"
        ) from None
    return found


def _check_factors(
    directory: Path,
    module: str,
    factors: Mapping[str, tuple[int, ...]],
    rank: float,
    shape: tuple[int, ...],
) -> None:
    """Raise :class:`UserError` unless both factors are there, of that rank, for a weight of
    ``shape``.
    """
    for factor in "AB":
        if factor not in factors:
            raise UserError(f"{directory}: {module} has no lora_{factor}")
    rows, columns = shape
    if factors["A"] != (rank, columns) or factors["B"] != (rows, rank):
        raise UserError(
            f"{directory}: {module} has factors of the shapes {list(factors['A'])} and "
            f"{list(factors['B'])}, which rank {rank:g} does not have for the model's weight "
            f"{list(shape)}; is the adapter of another model?"
        )


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{path}: peft_type {config.get('peft_type')!r:.40} is not read; only LORA is"
        )
    for key, harmless in _REFUSED.items():
        value = config.get(key)
        if value not in (None, harmless, [], {}):
            raise UserError(
                f"{path}: {key}={value!r:.60} adds something else to the model than a product of "
                "two factors, which is not supported; train the adapter without it"
            )
    begun = str(config.get("init_lora_weights", "")).lower()
    if begun.startswith(_CHANGES_THE_MODEL):
        raise UserError(
            f"{path}: init_lora_weights={begun} has changed the model's own weights, which the "
            "factors are relative to; convert the adapter with PEFT "
            "(path_initial_model_for_weight_conversion)"
        )
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1e6:  # type: ignore[operator]
            raise UserError(f"{path}: {key} must be a number above 0, not {value!r:.40}")
    known = _READ | _WITHOUT_INFLUENCE | _REFUSED.keys()
    for key, value in config.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise UserError(
                f"{path}: {key}={value!r:.60} is not known here, and may change what the adapter "
                "computes; remove it if it does not"
            )


def _pattern_of(module: str, patterns: object, default: float, path: Path) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does
    it, or the default.
    """
    if not patterns:
        return default
    if not isinstance(patterns, Mapping):
        raise UserError(f"{path}: a pattern is an object, not {patterns!r:.60}")
    for pattern, value in patterns.items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise UserError(f"{path}: the pattern {pattern!r} ({error})") from None
        if not matches:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value <= 0:
            raise UserError(f"{path}: {pattern}={value!r:.40} is not a number above 0")
        return float(value)
    return default
