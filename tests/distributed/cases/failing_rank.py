"""``train`` on a vLLM engine of two ranks, of which one fails alone in the middle of the second
rollout.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_dcpo import cli
from megatron_dcpo.rollout.vllm_engine import VllmEngine


def run(options: dict[str, Any]) -> None:
    whole, rollouts = VllmEngine._steps, 0

    def failing_run(engine: VllmEngine, **arguments: Any) -> Any:
        nonlocal rollouts
        rollouts += 1
        step, steps = engine.llm.llm_engine.step, 0

        def failing_step() -> Any:
            nonlocal steps
            steps += 1
            if rollouts == 2 and steps == 3 and os.environ["RANK"] == "1":
                raise RuntimeError("out of memory, on this rank alone")
            return step()

        engine.llm.llm_engine.step = failing_step
        try:
            yield from whole(engine, **arguments)
        finally:
            engine.llm.llm_engine.step = step

    VllmEngine._steps = failing_run  # type: ignore[method-assign]
    sys.exit(cli.main(options["arguments"]))
