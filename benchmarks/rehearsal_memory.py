"""What a rehearsal says against what real ranks hold, on the CPU: ``python
benchmarks/rehearsal_memory.py``.

The shapes of ``plan_memory.py``: models of 4 layers, hidden 512, vocabulary 8,000, micro-batches of
2,048 tokens. Each rank carries out the phases of a step twice: in a job of real ranks, with real
tensors over gloo, and rehearsed, with tensors that hold nothing. The same ledger counts both, and
its peaks are compared phase by phase.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

from measurement import Measurement, torchrun
from plan_memory import RUNS, SETTINGS

from megatron_dcpo.architectures.config_json import Architecture, read_architecture
from megatron_dcpo.config import Config
from tests.helpers.rehearsals import SHAPE, small_job

CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def measured(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What this real rank holds, phase by phase, for every setting."""
    from megatron_dcpo.rehearsal.job import carry_out
    from megatron_dcpo.rehearsal.ledger import OperationLedger
    from megatron_dcpo.runtime import distributed

    found = []
    for config, arch in configurations(options):
        ledger = OperationLedger("cpu")
        topology = distributed.initialize(config.parallel.sizes, seed=1)
        with ledger:
            carry_out(config, arch, topology, ledger)
        found.append({phase.name: phase.peak for phase in ledger.phases})
    distributed.destroy()
    return found


def rehearsed(options: dict[str, Any], rank: int, ranks: int) -> list[dict[str, Any]]:
    from megatron_dcpo.rehearsal.job import rehearse
    from megatron_dcpo.runtime.rehearsed_world import Rank

    found = []
    for config, arch in configurations(options):
        done = rehearse(config, arch, Rank(rank=rank, world_size=ranks, on_gpu=False))
        found.append({phase.name: phase.peak for phase in done.phases})
    return found


def configurations(options: dict[str, Any]) -> Iterator[tuple[Config, Architecture]]:
    directory = Path(options["model"])
    for dtype, recompute, packing in options["settings"]:
        parallel = {"recompute_granularity": recompute, "sequence_packing": packing}
        config = small_job(directory, options["parallel"] | parallel, dtype)
        yield config, read_architecture(directory)


def results() -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """Of every rank and setting: its name, and the peaks of its phases, rehearsed and measured."""
    for family, name, ranks, parallel in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            config = SHAPE | {
                "num_hidden_layers": 4,
                "architectures": [CLASSES[family]],
                "model_type": family,
            }
            Path(scratch, "config.json").write_text(json.dumps(config))
            options = {"model": scratch, "parallel": parallel, "settings": SETTINGS}
            real = ranks_of(ranks, options | {"out": scratch, "how": "measured"})
            for rank in range(ranks):
                here = options | {"out": scratch, "how": "rehearsed", "as": [rank, ranks]}
                (fake,) = ranks_of(1, here)
                for setting, one, other in zip(SETTINGS, fake, real[rank], strict=True):
                    yield f"{family}, {name}, rank {rank}, {setting}", one, other


def ranks_of(ranks: int, options: dict[str, Any]) -> list[Any]:
    torchrun(ranks, str(Path(__file__).resolve()), json.dumps(options))
    files = [Path(options["out"], f"rank{rank}.json") for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


def measurements() -> Iterator[Measurement]:
    """The worst ratio of the peaks of an update."""
    ratios = {name: (one["update"], other["update"]) for name, one, other in results()}
    for bound, how, goal in ((max, "largest", 1.02), (min, "smallest", 0.98)):
        name, (one, other) = bound(ratios.items(), key=lambda item: item[1][0] / item[1][1])
        yield Measurement(
            f"rehearsal_memory/peak, {how} ratio",
            one,
            other,
            "bytes rehearsed",
            "bytes held",
            at_least=how == "smallest",
            goal=goal,
            reason=name,
            raw={key: round(a / b, 4) for key, (a, b) in ratios.items()},
        )


def main() -> None:
    within = count = 0
    for name, one, other in results():
        ratios = {phase: one[phase] / other[phase] for phase in one}
        print(name, " ".join(f"{phase} {ratio:.4f}" for phase, ratio in ratios.items()), flush=True)
        count += 1
        within += abs(ratios["update"] - 1) <= 0.02
    print(f"peak of an update within 2 %: {within} of {count}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chosen = json.loads(sys.argv[1])
        rank = int(os.environ["RANK"])
        if chosen["how"] == "measured":
            said = measured(chosen)
        else:
            said = rehearsed(chosen, *chosen["as"])
        Path(chosen["out"], f"rank{rank}.json").write_text(json.dumps(said))
    else:
        main()
