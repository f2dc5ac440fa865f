"""How weights enter a vLLM engine of this process: a backend of vLLM's own weight-transfer API. Imports vLLM.

The trainer's ranks run the engine in their own process, so nothing is left to transport here: a bucket's slices are given
to the model's loaders inside vLLM's layerwise reload, which repacks each layer into the form its kernels want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_dcpo import runtime
from megatron_dcpo.weights.piece import Piece

BACKEND = "megatron_dcpo"


class EngineSlice(Tensor):
    """A tensor of which only ``piece`` is here, in the shape of the whole: what a tensor-parallel loader is given.

    vLLM's loaders take whole tensors and narrow them to the slice of their rank. Narrowing this one inside the slice gives
    the values; reading anything else raises RuntimeError, so that no number is ever made up.
    """

    piece: Piece

    @staticmethod
    def __new__(cls, piece: Piece, shape: Sequence[int]) -> EngineSlice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=piece.values.dtype, device=piece.values.device
        )
        made.piece = piece
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        piece = args[0].piece
        if func is torch.ops.aten.slice.Tensor:
            dim, start, stop = (*args[1:4], None, None, None)[:3]
            dim, start = dim or 0, start or 0
            stop = min(args[0].shape[dim] if stop is None else stop, args[0].shape[dim])
            if dim == piece.dim and piece.start <= start and stop <= piece.start + piece.values.shape[dim]:
                return piece.values.narrow(dim, start - piece.start, stop - start)
        raise RuntimeError(
            f"vLLM's loader asked for more of {piece.name} than the slice of its rank ({func}{tuple(args[1:])}); "
            "this version of vLLM cuts the model in another way than megatron_dcpo/weights/engine_slices.py says"
        )


@dataclass
class _Init(WeightTransferInitInfo):
    """There is no one to connect to."""


@dataclass
class _Update(WeightTransferUpdateInfo):
    """(name, tensor) pairs of whole modules, and their full shapes. They stay the caller's."""

    pieces: Sequence[Piece]
    shapes: dict[str, tuple[int, ...]]
    tied_embeddings: bool


class InProcessTransfer(WeightTransferEngine[_Init, _Update]):
    """Start, update per bucket, finish: vLLM's life cycle of a weight update."""

    init_info_cls = _Init
    update_info_cls = _Update

    def init_transfer_engine(self, init_info: _Init) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        self._kept: set[int] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        runtime.synchronize()  # the bucket may be overwritten as soon as this returns

    def receive_weights(self, update_info: _Update) -> None:
        named = []
        for piece in update_info.pieces:
            shape = update_info.shapes[piece.name]
            whole = tuple(piece.values.shape) == tuple(shape)
            tensor = piece.values if whole else EngineSlice(piece, shape)
            named.append((piece.name, tensor))
            if update_info.tied_embeddings and piece.name == "model.embed_tokens.weight":
                # On the CPU the output layer keeps a packed copy of its own, which the embedding does not refresh.
                named.append(("lm_head.weight", tensor))
        self.model.load_weights(iter(named))
        self._keep_what_waits()

    def _keep_what_waits(self) -> None:
        """Copy what vLLM has put off until the end of the update, for the bucket will be overwritten.

        It waits for modules to be complete, and by its count those with padding (a vocabulary that is no multiple of 64)
        or with a shared tensor (tied embeddings) never are.
        """
        for layer in self.model.modules():
            for _, arguments in get_layerwise_info(layer).loaded_weights:
                for key, value in arguments.arguments.items():
                    if isinstance(value, Tensor) and not value.is_meta and id(value) not in self._kept:
                        arguments.arguments[key] = copy = _copied(value)
                        self._kept.add(id(copy))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""


def _copied(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, EngineSlice):
        return tensor.clone()
    piece = tensor.piece
    return EngineSlice(Piece(piece.name, piece.dim, piece.start, piece.values.clone()), tensor.shape)


def register() -> str:
    """Make the backend known to vLLM; returns its name."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)
    return BACKEND
