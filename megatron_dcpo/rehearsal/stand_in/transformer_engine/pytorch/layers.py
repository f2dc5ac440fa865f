"""Layers that compute what Transformer Engine's do, in torch, with Megatron's collectives."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine.pytorch import shapes
from transformer_engine.pytorch.pointers import CUDNN_ALIGNMENT, refuse_misread
from transformer_engine.pytorch.signatures import checked


class _Module(nn.Module):
    def get_extra_state(self) -> Tensor:
        """Every layer of the package has one, empty without eight-bit recipes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


def _mark(parameter: Any, dim: int) -> None:
    for name, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dim),
        ("partition_stride", 1),
    ):
        assert not hasattr(parameter, name)
        setattr(parameter, name, value)


def _norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """In fp32 with the scale in fp32, then rounded once: the kernels' order, which differs from
    Hugging Face's in bf16.
    """
    refuse_misread("the weight of a norm", weight, like=x)
    if shapes.is_fake(x):
        return shapes.norm(x, weight)
    scale = weight.float() + zero_centered
    return (F.rms_norm(x.float(), weight.shape, None, eps) * scale).to(x.dtype)


class RMSNorm(_Module):
    @checked("RMSNorm.__init__")
    def __init__(self, normalized_shape: int | None = None, **options: Any) -> None:
        super().__init__()
        size = options.get("hidden_size") or normalized_shape
        self.eps = options.get("eps", 1e-5)
        self.zero_centered_gamma = bool(options.get("zero_centered_gamma"))
        self.weight = nn.Parameter(
            torch.ones(
                size,
                dtype=options.get("params_dtype") or options.get("dtype"),
                device=options.get("device"),
            )
        )
        self.weight.sequence_parallel = bool(options.get("sequence_parallel"))  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the stand-in has RMSNorm only")


class _FusedProduct(torch.autograd.Function):
    """x @ weight.t(), whose weight gradient is added to ``main_grad`` by the product itself, or
    takes its place in a first micro-batch (``accumulate_wgrad_into_param_main_grad`` in the
    package's ``module/linear.py``). A weight that is not trained needs no ``main_grad``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: bool | None) -> Tensor:
        ctx.first, ctx.weight = first, weight
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dummy = None
        if weight.requires_grad:
            refuse_misread("main_grad", weight.main_grad, like=grad)
            assert weight.main_grad.shape == weight.shape
            product = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.main_grad.dtype)
            if ctx.first:
                weight.main_grad.copy_(product)
            else:
                weight.main_grad.add_(product)
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
                dummy = torch.full_like(weight, torch.nan)  # of any value: the hook drops it
        return grad @ weight, dummy, None


class Linear(_Module):
    """[..., in] x [out, in]: ``column`` splits out, ``row`` splits in, with their collectives."""

    @checked("Linear.__init__")
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self.fused = bool(options.get("fuse_wgrad_accumulation"))
        self.tp_size, self.tp_group = options.get("tp_size", 1), options.get("tp_group")
        self.save_original_input = options.get("save_original_input", False)
        self.parallel_mode, self.return_bias = (
            options.get("parallel_mode"),
            options.get("return_bias", False),
        )
        self.sequence_parallel = self.tp_size > 1 and options.get("sequence_parallel", False)
        for name, mode in (("out_features", "column"), ("in_features", "row")):
            size = out_features if mode == "column" else in_features
            setattr(self, name, size // self.tp_size if self.parallel_mode == mode else size)
        kind = {"dtype": options.get("params_dtype"), "device": options.get("device", "cuda")}
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **kind))
        self.bias = (
            nn.Parameter(torch.zeros(self.out_features, **kind))
            if options.get("bias", True)
            else None
        )
        _mark(self.weight, 1 if self.parallel_mode == "row" else 0)  # whatever the number of ranks
        if self.bias is not None and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.bias is not None and self.parallel_mode == "column":
            _mark(self.bias, 0)

    @checked("Linear.forward")
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._multiply(inp, is_first_microbatch)

    def _multiply(self, x: Tensor, first: bool | None) -> Any:
        if shapes.is_fake(x):
            return shapes.linear(self, x)
        from megatron.core.tensor_parallel import mappings  # which imports this package

        if self.tp_size > 1 and self.parallel_mode == "column":
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(
                    x, tensor_parallel_output_grad=True, group=self.tp_group
                )
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        row = self.tp_size > 1 and self.parallel_mode == "row"
        bias = None if row or self.return_bias else self.bias
        refuse_misread("the weight of a linear layer", self.weight, like=x, dtype=x.dtype)
        if bias is not None:
            refuse_misread("the bias of a linear layer", bias, like=x, dtype=x.dtype)
        if self.fused:
            y = _FusedProduct.apply(x, self.weight, first)
            y = y if bias is None else y + bias
        else:
            y = F.linear(x, self.weight, bias)
        if row:
            reduce = mappings.reduce_from_tensor_model_parallel_region
            y = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce
            )(y, group=self.tp_group)
            y = y if self.bias is None or self.return_bias else y + self.bias
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    """RMSNorm, whose weight is ``layer_norm_weight``, and then the linear layer."""

    @checked("LayerNormLinear.__init__")
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        norm = {
            name: options.pop(name, None)
            for name in ("normalization", "eps", "zero_centered_gamma")
        }
        options.pop("return_layernorm_output", None)
        assert norm["normalization"] == "RMSNorm"
        super().__init__(in_features, out_features, **options)
        self.zero_centered_gamma = bool(norm["zero_centered_gamma"])
        self.eps = norm["eps"]
        kind = {"dtype": options.get("params_dtype"), "device": options.get("device", "cuda")}
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, **kind))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    @checked("LayerNormLinear.forward")
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if shapes.is_fake(inp):
            refuse_misread("the weight of a norm", self.layer_norm_weight, like=inp)
            return shapes.linear(self, inp, norm_weight=self.layer_norm_weight)
        normed = _norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return self._multiply(normed, is_first_microbatch)


class GroupedLinear(_Module):
    """Experts, of which there are only shapes: ``num_gemms`` linear layers, each for its share of
    the tokens.
    """

    @checked("GroupedLinear.__init__")
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.fp8_meta = {"num_gemms": num_gemms, "fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = self.use_bias = False
        assert not options.get("bias"), "the stand-in has experts without biases"
        kind = {"dtype": options.get("params_dtype"), "device": options.get("device", "cuda")}
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, **kind))
            self.register_parameter(f"weight{number}", weight)

    @checked("GroupedLinear.forward")
    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        if not shapes.is_fake(inp):
            raise NotImplementedError("the stand-in computes no experts")
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return shapes.grouped_linear(inp, m_splits, weights)


def _extra_state_may_be_missing(_: nn.Module, keys: Any) -> None:
    """As in the real package: Megatron saves none of the attention's."""
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if "core_attention._extra_state" not in key
    ]


class DotProductAttention(_Module):
    """Causal attention of [s, b, heads, d], or of packed [t, heads, d] with ``padding_causal`` and
    ``cu_seqlens``.

    With a ``cp_group`` each rank has the first and the last of what is left of every sequence's 2 x
    CP chunks.
    """

    @checked("DotProductAttention.__init__")
    def __init__(self, num_attention_heads: int, kv_channels: Any, **options: Any) -> None:
        super().__init__()
        self.attention_dropout = options.get("attention_dropout", 0.0)
        self.softmax_scale = options.get("softmax_scale")
        # tokens before and after the one that attends; -1 for all
        self.window = options.get("window_size") or (-1, 0)
        self.cp_group = options.get("cp_group")
        self.cp_comm_type = options.get("cp_comm_type")
        if self.cp_group is not None:
            assert options["cp_comm_type"] in ("p2p", "all_gather")
            assert self.window == (-1, 0) or options["cp_comm_type"] == "all_gather"
            assert options["cp_global_ranks"] == torch.distributed.get_process_group_ranks(
                self.cp_group
            )
        self.register_load_state_dict_post_hook(_extra_state_may_be_missing)

    @checked("DotProductAttention.forward")
    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        layers = query_layer, key_layer, value_layer
        assert self.attention_dropout == 0.0
        # The masks are types, of which the kernels make their own.
        assert attention_mask is None
        for name, layer in zip(("queries", "keys", "values"), layers, strict=True):
            refuse_misread(
                name,
                layer,
                like=query_layer,
                dtype=query_layer.dtype,
                alignment=CUDNN_ALIGNMENT,
                rows_only=True,
            )
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            if options.get(name) is not None:
                refuse_misread(name, options[name], like=query_layer, dtype=torch.int32)
        if shapes.is_fake(query_layer):
            bounds = None
            if options.get("qkv_format", "sbhd") == "thd":
                bounds = options["cu_seqlens_q"]
            return shapes.attention(self, layers, bounds)
        if self.cp_group is not None:
            return self._across_ranks(layers, options)
        if options.get("qkv_format", "sbhd") == "thd":
            assert options["attn_mask_type"] == "padding_causal", (
                "thd has no other mask in the real package"
            )
            bounds = options["cu_seqlens_q"].tolist()
            assert options["max_seqlen_q"] >= max(b - a for a, b in itertools.pairwise(bounds))
            assert bounds[-1] == len(query_layer), (
                "every token belongs to a sequence, the filler's included"
            )
            pieces = [
                self._attend(*(x[a:b].unsqueeze(1) for x in layers)).squeeze(1)
                for a, b in itertools.pairwise(bounds)
            ]
            return torch.cat(pieces)
        assert options["attn_mask_type"] == "causal"
        return self._attend(*layers)

    def _across_ranks(self, layers: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
        """Keys and values of all ranks in the ranks' order; who sees whom is said by a mask of
        sequences and positions.
        """
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        size, packed, bounds = (
            self.cp_group.size(),
            layers[0].dim() == 3,
            [0, len(layers[0]) * self.cp_group.size()],
        )
        if packed:
            bounds = options["cu_seqlens_q"].tolist()
            assert bounds[-1] == size * len(layers[0]), "the bounds are those of whole sequences"
            assert all(bound % (2 * size) == 0 for bound in bounds)
        chunks = torch.cat(
            [torch.arange(b - a) * 2 * size // (b - a) for a, b in itertools.pairwise(bounds)]
        )
        owners = torch.minimum(chunks, 2 * size - 1 - chunks)
        held = torch.cat([(owners == rank).nonzero()[:, 0] for rank in range(size)])
        number = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
        own = (owners == self.cp_group.rank()).nonzero()[:, 0]
        mask = (number[own, None] == number[held]) & self._sees(own, held)
        q, *keys_and_values = (x.unsqueeze(1) if packed else x for x in layers)
        gathered = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)
            for x in keys_and_values
        )
        out = self._attend(q, *gathered, mask=mask)
        return out.squeeze(1) if packed else out

    def _sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys a query sees, by their positions."""
        before = queries[:, None] - keys
        if self.window == (-1, 0):
            return before >= 0
        return (before >= 0) & (before <= self.window[0])

    def _attend(self, *layers: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in layers)
        if mask is None and self.window != (-1, 0):
            tokens = torch.arange(q.shape[2])
            mask = self._sees(tokens, tokens)
        how = {"scale": self.softmax_scale, "enable_gqa": q.shape[1] != k.shape[1]}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **how)
        return out.permute(2, 0, 1, 3).flatten(2)
