"""Import and export with Megatron-Bridge, run by its own interpreter: the peer of
``benchmarks/convert.py --peer PYTHON``.

    python -m venv peer && peer/bin/pip install torch==2.13.0
    peer/bin/pip install megatron-core==0.16.1 transformers==5.19.0 accelerate datasets omegaconf
    hydra-core rich six
    peer/bin/pip install --no-deps megatron-bridge==0.3.1

Transformer Engine and other packages with CUDA kernels are not installable without a GPU;
conversion on the CPU calls nothing of them. They are replaced by modules whose every attribute
exists.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import resource
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import DATA, PEERS, Measurement, absent, not_installed, peer_has

_ABSENT = (
    "transformer_engine",
    "transformer_engine_torch",
    "mamba_ssm",
    "causal_conv1d",
    "fla",
    "nvidia_resiliency_ext",
    "open_clip",
    "qwen_vl_utils",
    "timm",
    "wandb",
    "mlflow",
    "modelopt",
)


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "transformer_engine":
            module.__version__ = "2.8.0"
        if module.__name__ == "transformer_engine.pytorch":
            module.__dict__.update(_transformer_engine_layers())
        module.get_cpu_offload_context = lambda *_, **__: (contextlib.nullcontext(), lambda x: x)


def _transformer_engine_layers() -> dict[str, Any]:
    """Modules with the parameters that Transformer Engine's have; nothing is ever computed with
    them.
    """
    import torch

    def parameter(*shape: int, dtype: Any) -> Any:
        return torch.nn.Parameter(torch.empty(shape, dtype=dtype))

    class _Base(torch.nn.Module):
        def set_tensor_parallel_group(self, group: Any) -> None:
            pass

        def get_extra_state(self) -> Any:
            return None

        def set_extra_state(self, state: Any) -> None:
            pass

    class Linear(_Base):
        def __init__(
            self, in_features: int, out_features: int, *, params_dtype: Any = None, **_: Any
        ) -> None:
            super().__init__()
            self.weight = parameter(out_features, in_features, dtype=params_dtype)

    class LayerNormLinear(Linear):
        def __init__(
            self, in_features: int, out_features: int, *, params_dtype: Any = None, **_: Any
        ) -> None:
            super().__init__(in_features, out_features, params_dtype=params_dtype)
            self.layer_norm_weight = parameter(in_features, dtype=params_dtype)

    class RMSNorm(_Base):
        def __init__(
            self, hidden_size: int, *_: Any, params_dtype: Any = None, dtype: Any = None, **__: Any
        ) -> None:
            super().__init__()
            self.weight = parameter(
                hidden_size, dtype=params_dtype or dtype or torch.get_default_dtype()
            )

    class DotProductAttention(_Base):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    class GroupedLinear(_Base):
        pass

    return {
        cls.__name__: cls
        for cls in (Linear, LayerNormLinear, RMSNorm, DotProductAttention, GroupedLinear)
    } | {"LayerNorm": RMSNorm}


def measurements() -> Iterator[Measurement]:
    """1.2 GB, both in turns; the peer's interpreter is made as above and named in DCPO_PEERS."""
    package = "--no-deps megatron-bridge==0.3.1"
    reason = "" if peer_has("megatron.bridge") else not_installed(package)
    if not reason and not (DATA / "qwen_tokenizer").is_dir():
        reason = f"no tokenizer in {DATA}/qwen_tokenizer, which Megatron-Bridge does not do without"
    if reason:
        for name, unit, goal in (
            ("import", "s", 1.0),
            ("export", "s", 1.0),
            ("memory", "bytes", 0.1),
        ):
            yield absent(
                f"megatron_bridge/{name}", unit, "Megatron-Bridge 0.3.1", reason, goal=goal
            )
        return
    import convert

    results, same = convert.warm_rounds("qwen3_0.6b", 3, PEERS)
    for step in ("import", "export"):
        yield convert.compared(
            f"megatron_bridge/{step}",
            results,
            step,
            f"peer_{step}",
            "Megatron-Bridge 0.3.1",
            goal=1.0,
            same=same,
        )
    resident = {
        step: max(r["peak_resident_bytes"] for r in results[step])
        for step in ("import", "peer_import")
    }
    yield Measurement(
        "megatron_bridge/memory",
        max(r["peak_anonymous_bytes"] for r in results["import"]),
        resident["peer_import"],
        "bytes (ours: anonymous memory; maps of files are the page cache's)",
        "Megatron-Bridge 0.3.1, resident",
        goal=0.1,
        same=same,
        raw=resident,
    )


def main() -> None:
    step, source, target, config = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.meta_path.append(_StubFinder())
    import torch

    from megatron_dcpo.runtime.megatron_on_cpu import ensure

    ensure()  # what Megatron-core asks of CUDA
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import checkpointing

    checkpointing.restore_modelopt_state = lambda *_: None  # a stub's attribute takes no arguments
    clock = time.perf_counter()
    if step == "import":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        AutoBridge.import_ckpt(source, target, torch_dtype=torch.bfloat16)
    else:
        AutoBridge.from_hf_pretrained(config).export_ckpt(source, target, show_progress=False)
    seconds = time.perf_counter() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_resident_bytes": peak}))


if __name__ == "__main__":
    main()
