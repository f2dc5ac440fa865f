"""The end of a run: the policy as a Hugging Face directory that any tool can load."""

from __future__ import annotations

from pathlib import Path

from megatron_dcpo.policy.model import DTYPES
from megatron_dcpo.training.setup import Run
from megatron_dcpo.weights.reshard import gather_full
from megatron_dcpo.weights.safetensors_io import write_checkpoint


def export_policy(run: Run) -> Path:
    """Write ``run_dir/policy`` (weights of the policy, everything else from ``model.path``). Collective."""
    out = run.directory / "policy"
    write_checkpoint(
        out,
        Path(run.config.model.path),
        run.policy.arch,
        DTYPES[run.config.model.params_dtype],
        lambda shapes: gather_full(run.policy, shapes),
        writer=run.topology.rank == 0,
    )
    return out
