"""A backend of vLLM's weight-transfer API for a vLLM engine in this process. Imports vLLM.

The trainer's ranks run the engine in their own process, so there is nothing to transport: the
slices of a bucket are given to the model's loaders, which write them into the live parameters. On a
GPU the kernels read these parameters, and nothing is copied a second time. The CPU build packs most
layers for its kernels and drops the parameters that the loader filled. Such a layer gets its plain
parameters back while its slices arrive, and then vLLM packs it again. So does a linear layer that
vLLM quantizes to FP8 when it loads: when its slices have come, vLLM quantizes it, and copies the
result to where its kernels read. For one scale of a whole layer the ranks of an engine meet in a
collective, so that waits for the next bucket, which comes when every rank has taken this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
)

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.runtime.device import synchronize
from megatron_dcpo.runtime.megatron_private import wrapper_tensor
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.reshard_plan import engine_slice
from megatron_dcpo.weights.table import EMBEDDING, hf_shapes

BACKEND = "megatron_dcpo"
_UNQUANTIZED = UnquantizedLinearMethod | UnquantizedEmbeddingMethod | UnquantizedFusedMoEMethod
_FP8 = Fp8PerTensorOnlineLinearMethod | Fp8PerBlockOnlineLinearMethod | Fp8PtpcOnlineLinearMethod


class SliceOfWhole(Tensor):
    """What a loader is given: a tensor in the shape of the whole, of which only ``piece`` is here.

    vLLM's loaders take whole tensors, narrow them to the slice that their rank keeps, and copy that
    to its place. From this one they copy what ``piece`` has of it; the rest comes with other
    pieces. The loader of experts gives a tensor a first dimension, its expert, and takes that away
    again. Anything else a loader does with it, a slice other than ``keeps`` (dimension, start,
    stop) too, raises RuntimeError, so that no number is ever made up.
    """

    piece: WeightSlice
    keeps: tuple[int, int, int]
    window: tuple[int, int]  # what this is of the whole tensor, along the dimension of ``keeps``
    copied: list[int]  # numbers copied so far; shared with the tensors narrowed from this one

    @staticmethod
    def __new__(
        cls, piece: WeightSlice, shape: Sequence[int], keeps: tuple[int, int, int]
    ) -> SliceOfWhole:
        made: SliceOfWhole = wrapper_tensor(cls, shape, piece.values)
        made.piece = piece
        made.keeps = keeps
        made.window = (0, shape[piece.dim])
        made.copied = [0]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        whole = next(value for value in args if isinstance(value, cls))
        if whole.dim() > whole.piece.values.dim():
            if func is torch.ops.aten.unbind.int and args[1:] in ((), (0,)):
                return [whole._shaped(whole.shape[1:])]
        elif func is torch.ops.aten.unsqueeze.default and args[1] == 0:
            return whole._shaped((1, *whole.shape))
        elif func is torch.ops.aten.detach.default:
            return whole._narrowed()
        elif func is torch.ops.aten.slice.Tensor:
            return whole._narrowed(*args[1:])
        elif func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
            return whole._copy_to(args[0])
        raise whole._misread(f"called {func}")

    def _shaped(self, shape: Sequence[int]) -> SliceOfWhole:
        made = SliceOfWhole(self.piece, shape, self.keeps)
        made.window = self.window
        made.copied = self.copied
        return made

    def _narrowed(
        self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
    ) -> SliceOfWhole:
        start = start or 0
        stop = min(self.shape[dim] if stop is None else stop, self.shape[dim])
        if (start, stop) != (0, self.shape[dim]) and (dim != self.piece.dim or step != 1):
            raise self._misread(f"narrowed dimension {dim}")
        made = self._shaped([stop - start if d == dim else n for d, n in enumerate(self.shape)])
        begin = self.window[0] + (start if dim == self.piece.dim else 0)
        made.window = begin, begin + made.shape[self.piece.dim]
        return made

    def _copy_to(self, target: Tensor) -> Tensor:
        dim, start, stop = self.keeps
        if self.window != (start, stop) or target.shape != self.shape:
            raise self._misread(f"copied {self.window} to {tuple(target.shape)}")
        values = self.piece.values
        target.narrow(dim, self.piece.start - start, values.shape[dim]).copy_(values)
        self.copied[0] += values.numel()
        return target

    def _misread(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"vLLM's loader {what} of {self.piece.name}, of which this rank keeps {self.keeps}; "
            "this version of vLLM cuts "
            "the model in another way than megatron_dcpo/weights/reshard_plan.py says"
        )


@dataclass
class _Layer:
    """A module of vLLM's model during an update. ``missing``: numbers that have not come yet."""

    name: str
    module: nn.Module
    missing: int = 0
    opened: bool = False

    def open(self) -> None:
        """Have its parameters as the loaders fill them. Only the CPU build packs them in another
        form, which is dropped; that of a layer in FP8 is kept.
        """
        if self.opened:
            return
        self.opened = True
        info = get_layerwise_info(self.module)
        if self.is_fp8:
            self._open_beside_fp8(info)
            return
        packed = self.module.__dict__.pop("cpu_linear", None) is not None or self._packs_experts
        live = dict(self.module.named_parameters(recurse=False))
        if all(
            live[name].shape == loaded.shape for name, loaded in info.restore_metadata[0].items()
        ):
            return
        if not packed:
            raise RuntimeError(
                f"vLLM keeps {self.name} in another form than its loaders fill; this version is "
                "not supported"
            )
        restore_layer_on_meta(self.module, info)
        materialize_layer(self.module, info)

    def _open_beside_fp8(self, info: LayerReloadingInfo) -> None:
        """Give the layer plain parameters of their own, as vLLM's reload does. What the kernels
        read, and captured graphs know by its address, is kept in ``info`` for ``close``.
        """
        if info.kernel_tensors is None:  # there already when an update before was broken off
            info.kernel_tensors = get_layer_params_buffers(self.module)
            info.kernel_non_persistent_buffers = set(self.module._non_persistent_buffers_set)
        restore_layer_on_meta(self.module, info)
        materialize_layer(self.module, info)
        for tensor in get_layer_tensors(self.module).values():
            # without vLLM's wrapper, which keeps what it is given until the layer is complete
            loader = _get_original_loader(tensor)
            tensor.weight_loader = loader  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let vLLM prepare the completed layer for its kernels, as after loading. On a GPU there is
        nothing to do but for a layer in FP8: vLLM quantizes it and copies the result into what the
        kernels read.
        """
        if self.is_fp8:
            _layerwise_process(self.module, get_layerwise_info(self.module))
            return
        method = getattr(self.module, "quant_method", None)
        if method is None:
            return
        if self._packs_experts:
            # or vLLM takes this for an update on a GPU, and the kernel gets the plain weights
            method.moe_kernel = None
        method.process_weights_after_loading(self.module)

    @property
    def is_fp8(self) -> bool:
        return isinstance(getattr(self.module, "quant_method", None), _FP8)

    @property
    def _packs_experts(self) -> bool:
        method = getattr(self.module, "quant_method", None)
        return getattr(method, "unquantized_backend", None) is UnquantizedMoeBackend.CPU


@dataclass
class _Init(WeightTransferInitInfo):
    """There is no one to connect to."""


@dataclass
class _Update(WeightTransferUpdateInfo):
    """Slices of a bucket; they stay the caller's."""

    pieces: Sequence[WeightSlice]
    arch: Architecture


@dataclass
class _Expected:
    """Of every tensor the slice this rank keeps, and the layers it goes to: two for a tied
    embedding.
    """

    slices: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    layers: dict[str, list[_Layer]] = field(default_factory=dict)


class InProcessTransfer(WeightTransferEngine[_Init, _Update]):
    """Start, update per bucket, finish: vLLM's life cycle of a weight update."""

    init_info_cls = _Init
    update_info_cls = _Update

    def init_transfer_engine(self, init_info: _Init) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        self._expected: _Expected | None = None
        self._to_quantize: list[_Layer] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        synchronize()  # the bucket may be overwritten as soon as this returns

    def receive_weights(self, update_info: _Update) -> None:
        if self._expected is None:
            self._expected = self._expect(update_info.arch)
        self._quantize()
        self.model.load_weights(self._one_by_one(update_info, self._expected))

    def finish_weight_update(self) -> None:
        if self._expected:
            layers = [layer for layers in self._expected.layers.values() for layer in layers]
        else:
            layers = []
        incomplete = sorted({layer.name for layer in layers if layer.missing})
        if incomplete or not layers:
            raise RuntimeError(
                f"the weights of {', '.join(incomplete[:4]) or 'all layers'} did not come "
                "completely"
            )
        self._quantize()
        self._expected = None

    def shutdown(self) -> None:
        """Do nothing."""

    def _quantize(self) -> None:
        """Let vLLM quantize the layers that are complete. Collective over the engine's ranks."""
        for layer in self._to_quantize:
            layer.close()
        self._to_quantize.clear()

    def _expect(self, arch: Architecture) -> _Expected:
        size = self.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank()
        expected = _Expected()
        layers_of = dict[nn.Parameter, list[_Layer]]()
        for path, module in self.model.named_modules():
            layer = _Layer(path, module)
            for parameter in module.parameters(recurse=False):
                layers_of.setdefault(parameter, []).append(layer)
        for name, shape in hf_shapes(arch).items():
            dim, start, stop = expected.slices[name] = engine_slice(
                arch=arch, name=name, tp=size, rank=rank
            )
            expected.layers[name] = layers_of[self.model.get_parameter(self._parameter_name(name))]
            for layer in expected.layers[name]:
                layer.missing += math.prod(shape) // shape[dim] * (stop - start)
                _check_precision(layer)
        if arch.tied_embeddings:
            self._check_tied(expected.layers[EMBEDDING])
        return expected

    def _check_tied(self, layers: Sequence[_Layer]) -> None:
        """Raise RuntimeError if vLLM's output layer is none of those that the embedding goes to."""
        if all(layer.module is not self.model.lm_head for layer in layers):
            raise RuntimeError(
                "vLLM does not tie the output layer of this architecture to the embedding"
            )

    def _parameter_name(self, name: str) -> str:
        """Return the name of the parameter that a Hugging Face tensor goes to; of experts one that
        all of the layer's have in common.
        """
        layer, expert_part, _ = name.partition(".mlp.experts.")
        if expert_part:
            return f"{layer}.mlp.experts.routed_experts.w13_weight"
        # A model's loader maps the names first, and then that of the model inside it.
        mappers = []
        for model in (self.model, self.model.model):
            mapper = getattr(model, "hf_to_vllm_mapper", None)
            if mapper is not None and mapper not in mappers:
                mappers.append(mapper)
        for mapper in mappers:
            name = str(mapper.map_name(name))
        return name

    def _one_by_one(self, update: _Update, expected: _Expected) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors to the loader, which asks for the next one when it has copied the one
        before.
        """
        shapes = hf_shapes(update.arch)
        for piece in update.pieces:
            layers = expected.layers[piece.name]
            for layer in layers:
                layer.open()
            tensor = SliceOfWhole(piece, shapes[piece.name], expected.slices[piece.name])
            yield piece.name, tensor
            if tensor.copied != [piece.values.numel()]:
                raise RuntimeError(
                    f"vLLM's loader copied {tensor.copied[0]} of {piece.values.numel()} of "
                    f"{piece.name}"
                )
            for layer in layers:
                layer.missing -= piece.values.numel()
                if layer.missing:
                    continue
                if layer.is_fp8:
                    self._to_quantize.append(layer)
                else:
                    layer.close()


def _check_precision(layer: _Layer) -> None:
    """Raise RuntimeError for a layer that vLLM quantizes in another way than to FP8 on loading."""
    method = getattr(layer.module, "quant_method", None)
    if method is not None and not isinstance(method, _UNQUANTIZED | _FP8):
        raise RuntimeError(
            f"{layer.name} is quantized ({type(method).__name__}); weights can be handed over to "
            "layers that are not, or that vLLM quantizes to FP8 when it loads them"
        )


def register() -> str:
    """Make the backend known to vLLM; returns its name."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)
    return BACKEND
