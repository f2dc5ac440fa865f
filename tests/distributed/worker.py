"""One rank: run cases by name, one after the other, and leave their results in a file.

    python -m tests.distributed.worker OUT '[["policy", {"model": ...}], ...]'

A case is a module of ``tests/distributed/cases`` with a function ``run(options)``; what it returns
goes as JSON into the list of ``OUT/rankN.json``. ``options["out"]`` is OUT. The default process
group lives as long as the rank, so that the cases of one launch may ask for different layouts of
the same ranks. With ``options["leave_at_once"]`` the rank ends after the case and takes down no
group.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.helpers.transformer_engine import pretend


def main() -> None:
    out, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    results: list[Any] = []
    pretend()
    for name, options in jobs:
        case = importlib.import_module(f"tests.distributed.cases.{name}")
        try:
            results.append(case.run(options | {"out": str(out)}))
        except Exception:
            print(f"case {name} failed with {options}", file=sys.stderr, flush=True)
            raise
        (out / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(results))
        if options.get("leave_at_once"):
            sys.stdout.flush()
            os._exit(0)
        leave_layout()
    leave_groups()


def leave_layout() -> None:
    """Forget Megatron's groups, where there are any."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()


def leave_groups() -> None:
    if "torch" in sys.modules:
        from megatron_dcpo.runtime.distributed import destroy

        destroy()


if __name__ == "__main__":  # saving a checkpoint starts processes that import this again
    main()
