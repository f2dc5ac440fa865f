"""An adapter on disk: PEFT's directory (``adapter_config.json``, ``adapter_model.safetensors``). Beside it, for one that
states the confidence, ``confidence.json``: the statement's marker, and what the confidence sees beside the text.

PEFT reads an activated adapter as one, which acts from the statement's lead on (``alora_invocation_tokens``). Tokens of an
adapter's own stand at ids that the tokenizer leaves free: a pair of the output layer adds to their rows what they lack.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dcpo.config import AdapterConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.files import new_directory
from megatron_dcpo.runtime.text import read_json_object

DIRECTORY = "confidence_adapter"  # beside the model's weights
POLICY_DIRECTORY = "adapter"  # of the whole policy, in the run's directory
FEATURES = "confidence_features.weight"  # [hidden, features], no part of PEFT's file
TOKENS = "confidence_tokens.weight"  # [101, hidden], the output rows of its own tokens, beside the former
_OUTPUT = "lm_head"
KEPT = "adapter."  # before its tensors' names in a training's checkpoint
SCALE = "adapter.scale"  # there as well, of an adapter of the whole policy
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LowRank:
    """``A`` [rank, in] and ``B`` [out, rank] of one projection, fp32; ``scale`` is alpha / rank."""

    A: Tensor
    B: Tensor
    scale: float

    def part(self, dim: int, start: int, stop: int) -> Tensor:
        """scale * B A between two indices of dimension ``dim``."""
        A, B = self.A.detach(), self.B.detach()
        product = B[start:stop] @ A if dim == 0 else B @ A[:, start:stop]
        return product.mul_(self.scale)


@dataclass(frozen=True)
class SavedAdapter:
    """Of ``directory``. ``tensors``: ``model.layers.0.self_attn.q_proj.lora_A.weight`` [rank, in], ``...lora_B.weight``
    [out, rank], :data:`FEATURES` where the confidence sees log-probs, :data:`TOKENS`; ``scale``: alpha / rank; ``rank``: the
    highest; ``token_ids``: of its own tokens, where the model has room for them."""

    directory: Path
    tensors: dict[str, Tensor]
    rank: int
    scale: float
    marker: str
    activated: bool
    token_ids: tuple[int, ...] = ()

    @property
    def servable(self) -> bool:
        """Whether an engine that applies an adapter to the whole text computes the same."""
        return not self.activated and FEATURES not in self.tensors and len(self.token_ids) == self.own_tokens

    @property
    def own_tokens(self) -> int:
        """How many tokens of its own it chooses among; 0: digits."""
        return len(self.tensors[TOKENS]) if TOKENS in self.tensors else 0


@dataclass(frozen=True)
class Room:
    """For the tokens of an adapter's own, in a model's vocabulary: their ``ids``; the ``rows`` [101, hidden] of the output
    layer that stand there; its ``size`` in rows; the model's ``tokenizer``, to which they are added under names."""

    ids: tuple[int, ...]
    rows: Tensor
    size: int
    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any, output: Tensor, count: int) -> Room | None:
        """Behind the tokenizer's last id, or on the last of Llama's reserved tokens; None: neither has ``count`` places."""
        vocabulary = tokenizer.get_vocab()
        end = 1 + max(vocabulary.values())
        reserved = sorted(number for name, number in vocabulary.items() if "reserved_special_token" in name)
        ids = tuple(range(end, end + count)) if end + count <= len(output) else tuple(reserved[-count:])
        return cls(ids, output[list(ids)].float(), len(output), tokenizer) if len(ids) == count else None

    def pair(self, own: Tensor, scale: float) -> dict[str, Tensor]:
        """The pair of the output layer that makes its rows ``ids`` the rows ``own``; all others stay."""
        B = torch.zeros(self.size, len(own))
        B[list(self.ids), range(len(own))] = 1 / scale
        return {f"{_OUTPUT}.lora_A.weight": own - self.rows, f"{_OUTPUT}.lora_B.weight": B}

    def save_tokenizer(self, directory: Path) -> None:
        """The tokenizer with ``<conf_0.00>`` to ``<conf_1.00>``, where they are not tokens already."""
        tokenizer = copy.deepcopy(self.tokenizer)
        if self.ids[0] > max(tokenizer.get_vocab().values()):
            tokenizer.add_tokens([f"<conf_{value / 100:.2f}>" for value in range(len(self.ids))])
        tokenizer.save_pretrained(directory)


def write_adapter(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: AdapterConfig,
    base: str,
    statement: tuple[tuple[int, ...], str] | None = None,
    room: Room | None = None,
) -> None:
    """Write ``directory``. ``statement``: token ids of the lead and marker, where the adapter states the confidence;
    ``room``: for the tokens that it chooses among, so that PEFT and engines have them."""
    peft: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.targets),
        "bias": "none",
        "inference_mode": True,
    }
    if statement is not None and config.activated:
        peft["alora_invocation_tokens"] = list(statement[0])
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    beside = {name: whole.pop(name) for name in (FEATURES, TOKENS) if name in whole}
    if room is not None:
        rank, scale = len(room.ids), config.alpha / config.rank
        whole |= room.pair(beside[TOKENS], scale)
        peft["target_modules"].append(_OUTPUT)
        peft |= {"rank_pattern": {_OUTPUT: rank}, "alpha_pattern": {_OUTPUT: scale * rank}}
    with new_directory(directory, overwrite=True) as temporary:
        save_file({_PREFIX + name: tensor for name, tensor in whole.items()}, temporary / "adapter_model.safetensors")
        if beside:
            save_file(beside, temporary / "confidence.safetensors")
        (temporary / "adapter_config.json").write_text(json.dumps(peft, indent=1) + "\n")
        if statement is not None:
            about: dict[str, Any] = {
                "marker": statement[1],
                "sees": "logprobs" if FEATURES in beside else "text",
                "tokens": len(beside[TOKENS]) if TOKENS in beside else 0,
                "token_ids": list(room.ids) if room is not None else [],
            }
            (temporary / "confidence.json").write_text(json.dumps(about) + "\n")
        if room is not None:
            room.save_tokenizer(temporary)


def read_adapter(directory: Path) -> SavedAdapter:
    """Raises :class:`UserError` naming the file that is missing or damaged."""
    about, peft = (read_json_object(directory / name) for name in ("confidence.json", "adapter_config.json"))
    try:
        tensors = load_file(directory / "adapter_model.safetensors")
        if about["sees"] == "logprobs" or about.get("tokens"):
            tensors |= load_file(directory / "confidence.safetensors")
        rank = int(peft["r"])
        scale = float(peft["lora_alpha"]) / rank
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OUTPUT)}
        rank, ids = max(rank, *peft.get("rank_pattern", {}).values(), 0), tuple(about.get("token_ids", ()))
        return SavedAdapter(
            directory, tensors, rank, scale, str(about["marker"]), "alora_invocation_tokens" in peft, ids
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"confidence adapter {directory} cannot be read ({type(error).__name__}: {one_line(error, 200)})"
        ) from None


def pairs(saved: SavedAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    """Module -> (A, B). Raises KeyError where one of them is missing."""
    ending = ".lora_A.weight"
    names = [name.removesuffix(ending) for name in saved.tensors if name.endswith(ending)]
    return {name: (saved.tensors[name + ending], saved.tensors[f"{name}.lora_B.weight"]) for name in names}


def check_shapes(saved: SavedAdapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`UserError` for a pair that fits no module of the model with these ``shapes``."""
    where = saved.directory
    try:
        for name, (A, B) in pairs(saved).items():
            if shapes.get(f"{name}.weight") != (B.shape[0], A.shape[1]) or A.shape[0] != B.shape[1]:
                raise UserError(f"{where}: {name} is {tuple(B.shape)} x {tuple(A.shape)}, which does not fit the model")
    except (KeyError, IndexError) as error:
        raise UserError(f"{where}: {error} is missing or no matrix") from None
