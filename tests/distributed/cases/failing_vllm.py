"""``train`` on two vLLM engines, of which the second fails once: in the second rollout
(``generate``) or in the second weight update (``update``).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_dcpo import cli
from megatron_dcpo.rollout.vllm_engine import VllmEngine


def run(options: dict[str, Any]) -> None:
    counts = {"generate": 0, "update": 0, "restarted": 0}
    steps, update, restart = (VllmEngine._steps, VllmEngine.update_weights, VllmEngine.restart)

    def due(what: str) -> bool:
        counts[what] += 1
        return options["mode"] == what and counts[what] == 2 and os.environ["RANK"] == "1"

    def failing_steps(engine: VllmEngine, **arguments: Any) -> Any:
        if not due("generate"):
            return steps(engine, **arguments)
        step = engine.llm.llm_engine.step

        def failing_step() -> Any:
            engine.llm.llm_engine.step = step
            raise RuntimeError("this engine alone")

        engine.llm.llm_engine.step = failing_step
        return steps(engine, **arguments)

    def failing_update(engine: VllmEngine, buckets: Any, version: int) -> None:
        if due("update"):
            whole = engine.llm.update_weights

            def refuse(*_: Any) -> None:
                engine.llm.update_weights = whole
                raise RuntimeError("this engine alone")

            engine.llm.update_weights = refuse
        update(engine, buckets, version)

    def counted(engine: VllmEngine) -> None:
        counts["restarted"] += 1
        restart(engine)

    VllmEngine._steps, VllmEngine.update_weights = failing_steps, failing_update  # type: ignore[method-assign]
    VllmEngine.restart = counted  # type: ignore[method-assign]
    status = cli.main(options["arguments"])
    print(f"restarted {counts['restarted']}", flush=True)
    sys.exit(status)
