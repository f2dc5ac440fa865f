"""Megatron-core on the CPU over gloo: everything that assumes CUDA, replaced in one place.

What is covered, and why nothing more is needed:

1. ``torch.cuda`` queries (current device, streams, synchronization, RNG state) answer for the CPU.
2. Factory calls with a literal ``device="cuda"`` sit in a handful of Megatron modules. Those
modules get a ``torch`` whose
   factories put "cuda" tensors on the CPU. (A ``TorchFunctionMode`` would do it too, at a cost on
   *every* torch call.)
3. The optimizers compare ``Tensor.type()`` with ``torch.cuda.*Tensor``; within those calls, and
only there, the CPU types
   carry that name.
4. Experts: the dispatcher takes its counts from the device, and gloo gathers equal parts only.
5. Apex's ``FusedAdam`` is replaced by the one at the end of this file.

On a machine with CUDA, :func:`ensure` does the last only, and only where Megatron finds neither
Transformer Engine's Adam nor Apex's: with torch's a run cannot be resumed. Besides, the router asks
for a function of Transformer Engine's by a name that Megatron leaves undefined without it.

A release of Megatron that has a name no more is run without the replacement, and one line says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron_dcpo.runtime.device import has_cuda

logger = logging.getLogger(__name__)

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
    # Megatron and torch warn at import of what is missing on a machine without CUDA; `dcpo doctor`
    # reports it.
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
        what = "%s: not in the installed megatron-core, so not replaced for the CPU; dcpo doctor names the tested releases"
        logger.warning(what, ", ".join(_missing))


def _replace_torchs_adam() -> None:
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    if has_cuda() and not optimizer.USING_PYTORCH_OPTIMIZER:
        return  # a fused one, which runs on CUDA only
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    distributed.Adam = FusedAdam
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True


class _InertStream:
    """Stands for a CUDA stream or event where there is nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = record = synchronize = wait = wait_stream

    def record_event(self, *args: Any) -> _InertStream:
        return self


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    # One function object per name: torch's compiler refuses an object that it finds under two of
    # its names.
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
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]


def _replace(place: str, name: str, how: Callable[[Any], Any]) -> None:
    """Put ``how(what is there)`` in the place of ``name`` of a module of Megatron, or of a class in
    one.
    """
    module, _, kind = place.partition(":")
    try:
        owner: Any = importlib.import_module(f"megatron.core.{module}")
        owner = getattr(owner, kind) if kind else owner
        setattr(owner, name, how(getattr(owner, name)))
    except (ImportError, AttributeError):
        _missing.append(f"{place}.{name}")


def _patch_megatron() -> None:
    # Megatron wraps small fused operators in torch.compile at import; eager is faster to start and
    # exact on the CPU.
    compile_, torch.compile = torch.compile, _eager  # type: ignore[assignment]
    try:
        for name in (*_LITERAL_CUDA_MODULES, "models.gpt", "optimizer", "tensor_parallel.random"):
            with contextlib.suppress(ModuleNotFoundError):  # said below
                importlib.import_module(f"megatron.core.{name}")
    finally:
        torch.compile = compile_
    torch_on_cpu = _TorchOnCpu()
    for name in _LITERAL_CUDA_MODULES:
        _replace(name, "torch", lambda _: torch_on_cpu)
    _replace(
        "tensor_parallel.random",
        "_get_cuda_rng_state",
        lambda _: lambda *a, **k: torch.get_rng_state(),
    )
    _replace(
        "tensor_parallel.random",
        "_set_cuda_rng_state",
        lambda _: lambda s, *a, **k: torch.set_rng_state(s),
    )
    _replace("optimizer.distrib_optimizer:DistributedOptimizer", "__init__", _with_cuda_type_names)
    _replace(
        "optimizer.optimizer:Float16OptimizerWithFloat16Params", "__init__", _with_cuda_type_names
    )
    _replace("optimizer.optimizer", "clip_grad_by_total_norm_fp32", _with_cuda_type_names)
    _replace("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", lambda _: _to_numpy)
    _replace("tensor_parallel.mappings", "_gather_along_first_dim", _gather_unequal)
    _replace("tensor_parallel.mappings", "_reduce_scatter_along_first_dim", _reduce_scatter_unequal)


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert to NumPy. Megatron's converts what it moves from the device alone."""
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return tensor


def _gather_unequal(gather: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        own: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(own, group, output_split_sizes, *args)
        padded = own.new_zeros(max(output_split_sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat(
            [part[:size] for part, size in zip(parts, output_split_sizes, strict=True)]
        )

    return call


def _reduce_scatter_unequal(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        parts: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(parts, group, input_split_sizes, *args)
        summed = parts.clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed.split(input_split_sizes)[group.rank()].clone()

    return call


def _eager(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else _eager


class _TorchOnCpu(types.ModuleType):
    """The ``torch`` that Megatron modules with literal ``device="cuda"`` see: the same, but "cuda"
    means the CPU.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        # Parameter.type dispatches here twice, hence the second condition.
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2), with the interface
    and state of Apex's.

    torch's own ``AdamW`` counts ``step`` per parameter, Apex and Transformer Engine count it per
    parameter group. Megatron's checkpoints follow the latter; with torch's optimizer they either
    fail to load (``fully_reshardable``) or load without the step count, so that the bias correction
    of a resumed run silently starts anew. Counting per group removes both. ``adam_w_mode=False``
    adds the decay to the gradient instead (L2 regularization), as Apex does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        # by CUDA graphs, which are not there; Megatron-core passes it from 0.17 on
        capturable: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient. ``closure`` is not supported
        (Megatron passes none).
        """
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            group["step"] = group.get("step", 0) + 1
            if not params:
                continue
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            self._update(group, params)

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
