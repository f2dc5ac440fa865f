"""Megatron-core on the CPU over gloo: all assumptions of CUDA, replaced in one place.

What is covered, and why nothing more is needed:

1. ``torch.cuda`` queries (current device, streams, synchronization, RNG state) answer for the CPU.
2. Factory calls with a literal ``device="cuda"`` are in a handful of Megatron modules. Those get a
   ``torch`` whose factories put "cuda" tensors on the CPU. (A ``TorchFunctionMode`` would do it
   too, at a cost on *every* torch call.)
3. The optimizers compare ``Tensor.type()`` with ``torch.cuda.*Tensor``; within those calls, and
   only there, the CPU types carry that name.
4. Norm and clipping of the gradients are Megatron's own, also where Transformer Engine or Apex is
   installed (the image on a login node), whose kernels refuse tensors of the CPU.
5. Experts: the dispatcher takes its counts from the device, and gloo gathers only equal parts.
6. Apex's ``FusedAdam`` is replaced by the one at the end of this file.

On a machine with CUDA, :func:`ensure` does only the last, and only if Megatron finds neither
Transformer Engine's Adam nor Apex's, because a run with torch's Adam cannot be resumed. In addition
the router needs a name for a function of Transformer Engine that Megatron leaves undefined without
it.

If a release of Megatron lacks a patched name, that patch is skipped, and one line says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from megatron_dcpo.runtime.device import capabilities, current_device, has_cuda

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LITERAL_CUDA_MODULES = (
    "pipeline_parallel.schedules",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "distributed.finalize_model_grads",
    "models.common.embeddings.rope_utils",
    "tensor_parallel.data",
    "utils",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
)
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
)
_installed = False
_missing: list[str] = []


def ensure() -> None:
    """Make Megatron-core importable and runnable here. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    # At import Megatron and torch warn about things that are missing on a machine without CUDA;
    # `dcpo doctor` reports them.
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|apex|modelopt).*")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    if not has_cuda():
        _patch_torch_cuda()
        _patch_megatron()
    _replace_torchs_adam()
    experts: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    experts.te_general_gemm = getattr(experts, "te_general_gemm", None)
    if _missing:
        logger.warning(
            "%s: not in the installed megatron-core, so not replaced for the CPU; dcpo doctor "
            "names the tested releases",
            ", ".join(_missing),
        )


def _replace_torchs_adam() -> None:
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    if has_cuda() and not optimizer.USING_PYTORCH_OPTIMIZER:
        return  # a fused optimizer, which runs only on CUDA
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    distributed.Adam = FusedAdam
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True


class _InertStream:
    """Stands for a CUDA stream or event if there is nothing to order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, *args: object) -> None:
        pass

    wait_event = record = synchronize = wait = wait_stream

    def record_event(self, *args: object) -> _InertStream:
        return self


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = current_device
    # Each name gets a separate function object, because torch's compiler refuses an object that it
    # finds under two of its names.
    for owner, name in ((cuda, "synchronize"), (cuda, "empty_cache"), (cuda, "set_device")):
        setattr(owner, name, lambda *args, **kwargs: None)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    cuda.Stream = cuda.Event = _InertStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = lambda *args, **kwargs: _InertStream()
    cuda.default_stream = lambda *args, **kwargs: _InertStream()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        owner.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *args, **kwargs: self.to(current_device())  # type: ignore[method-assign, assignment]


def _replace(path: str, name: str, how: Callable[[Any], object]) -> None:
    """Replace ``name`` in a module of Megatron, or in a class of it, by ``how(original)``."""
    module, _, kind = path.partition(":")
    try:
        owner: Any = importlib.import_module(f"megatron.core.{module}")
        if kind:
            owner = getattr(owner, kind)
        setattr(owner, name, how(getattr(owner, name)))
    except (ImportError, AttributeError):
        _missing.append(f"{path}.{name}")


def _patch_megatron() -> None:
    # Megatron wraps small fused operators in torch.compile at import. Without it, they start faster
    # and are exact on the CPU.
    compile_ = torch.compile
    torch.compile = _eager  # type: ignore[assignment]
    try:
        for name in (*_LITERAL_CUDA_MODULES, "models.gpt", "optimizer", "tensor_parallel.random"):
            with contextlib.suppress(ModuleNotFoundError):  # reported below
                importlib.import_module(f"megatron.core.{name}")
    finally:
        torch.compile = compile_
    torch_on_cpu = _TorchOnCpu()
    for name in _LITERAL_CUDA_MODULES:
        _replace(name, "torch", lambda _: torch_on_cpu)
    _replace("tensor_parallel.random", "_get_cuda_rng_state", lambda _: _get_rng_state)
    _replace("tensor_parallel.random", "_set_cuda_rng_state", lambda _: _set_rng_state)
    _replace("optimizer.distrib_optimizer:DistributedOptimizer", "__init__", _with_cuda_type_names)
    _replace(
        "optimizer.optimizer:Float16OptimizerWithFloat16Params", "__init__", _with_cuda_type_names
    )
    _replace("optimizer.optimizer", "clip_grad_by_total_norm_fp32", _with_cuda_type_names)
    _replace_fused_kernels()
    _replace("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", lambda _: _to_numpy)
    _replace("tensor_parallel.mappings", "_gather_along_first_dim", _gather_unequal)
    _replace("tensor_parallel.mappings", "_reduce_scatter_along_first_dim", _reduce_scatter_unequal)


def _replace_fused_kernels() -> None:
    utils: Any = importlib.import_module("megatron.core.utils")
    applier = ("multi_tensor_applier", utils.local_multi_tensor_applier)
    scale = ("multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    norm = ("l2_norm_impl", utils.local_multi_tensor_l2_norm)
    for module, kernels in (
        ("optimizer.clip_grads", (applier, scale, norm)),
        ("optimizer.optimizer", (applier, scale)),
    ):
        for name, function in kernels:
            _replace(module, name, _always(function))


def _always(function: object) -> Callable[[object], object]:
    return lambda _: function


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _to_numpy(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Convert a tensor to NumPy if asked. Megatron's function only converts tensors that it moves
    from the device.
    """
    if as_numpy and isinstance(tensor, torch.Tensor):
        return tensor.numpy()
    return tensor


def _gather_unequal(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(
        values: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        *args: object,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1 or capabilities().separate_memory:
            return gather(values, group, output_split_sizes, *args)
        padded = values.new_zeros(max(output_split_sizes), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        sizes = zip(parts, output_split_sizes, strict=True)
        return torch.cat([part[:size] for part, size in sizes])

    return call


def _reduce_scatter_unequal(
    reduce_scatter: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    def call(
        parts: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        *args: object,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1 or capabilities().separate_memory:
            return reduce_scatter(parts, group, input_split_sizes, *args)
        summed = parts.clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed.split(input_split_sizes)[group.rank()].clone()

    return call


def _eager(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    """Stand in for ``torch.compile`` as a function and as a decorator with options."""
    if function is None:
        return _eager
    return function


class _TorchOnCpu(types.ModuleType):
    """The ``torch`` of Megatron modules with literal ``device="cuda"``: the same module, except
    that "cuda" means the device of this process.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_this_device(name))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _on_this_device(name: str) -> Callable[..., torch.Tensor]:
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = current_device()
        kwargs.pop("pin_memory", None)
        tensor: torch.Tensor = getattr(torch, name)(*args, **kwargs)
        return tensor

    return call


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - as torch's
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):
            return "torch.cuda." + answer.rpartition(".")[2]
        return answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2), with the interface
    and state of Apex's.

    torch's own ``AdamW`` counts ``step`` per parameter; Apex and Transformer Engine count it per
    parameter group, and so do Megatron's checkpoints. With torch's optimizer they either fail to
    load (``fully_reshardable``) or load without the step count, so that the bias correction of a
    resumed run silently starts again. Counting per group avoids both. ``adam_w_mode=False`` adds
    the decay to the gradient instead (L2 regularization), as Apex does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        # for CUDA graphs, which do not exist here; Megatron-core passes it from 0.17 on
        capturable: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. ``closure`` is not supported (Megatron passes
        none).
        """
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            group["step"] = group.get("step", 0) + 1
            if not parameters:
                continue
            for parameter in parameters:
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
            self._update(group, parameters)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        bias1 = 1 - beta1 ** group["step"]
        bias2 = 1 - beta2 ** group["step"]
        grads = [p.grad for p in params if p.grad is not None]
        exp_avg = [self.state[p]["exp_avg"] for p in params]
        exp_avg_sq = [self.state[p]["exp_avg_sq"] for p in params]
        if group["weight_decay"]:
            if self.adam_w_mode:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            else:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(exp_avg, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, bias2**0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, exp_avg, denominator, -group["lr"] / bias1)
