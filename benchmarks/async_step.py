"""Generation beside training (``rollout.max_staleness`` and a server) against one after the other,
a core for each.

    python benchmarks/run.py async_step        # ASYNC_STEPS=2: that many steps

Each alternative is a training of the 28M policy on one core and a server of its own on another,
whose responses are ragged; both take their steps in turns, so that one works while the other waits.
The learning rate is 0: both sample the same tokens, whatever the age of the weights. The bound is
what a step would take whose shorter half costs nothing, and the goal is a step of 1.05 times that:
how far it is below one after the other depends on the balance of the two halves, which is the
machine's.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import policies
from measurement import QUICK, Measurement, Stepper, absent, steps

SHAPE = "131k" if QUICK else "28M"
PROMPTS, GROUP, TOKENS, STOP = (4, 7, 32, 0.05) if QUICK else (4, 7, 512, 0.005)
STEPS, WARM_UP = (1, 1) if QUICK else (int(os.environ.get("ASYNC_STEPS", "8")), 2)
ALTERNATIVES = {"beside": 1, "after": 0}
OTHER = "one after the other (rollout.max_staleness: 0)"
SERVER = f"{sys.executable} {policies.QUICKSTART / 'engine_server.py'}"


def measurements() -> Iterator[Measurement]:
    rows = {
        name: taken[PROMPTS]
        for name, taken in in_turns({name: [PROMPTS] for name in ALTERNATIVES}).items()
    }
    if not rows:
        yield absent("async step, 28M", "s", OTHER, "two cores are needed, one for each")
        return
    yield from compared(rows)


def compared(rows: dict[str, list[dict[str, Any]]]) -> Iterator[Measurement]:
    """The steps ``beside`` and ``after``: over the bound, against each other, and who waits."""
    prompts = [[row.pop("prompts") for row in taken] for taken in rows.values()]
    for row in (row for taken in rows.values() for row in taken):
        row["tokens"] = sum(row.pop("lengths"))
    kept = {name: taken[WARM_UP:] for name, taken in rows.items()}
    tokens = [sum(row["tokens"] for row in taken) for taken in kept.values()]
    same = prompts[0] == prompts[1] and abs(tokens[0] - tokens[1]) <= 0.02 * tokens[1]
    median = {
        name: {key: statistics.median(row[key] for row in taken) for key in taken[0]}
        for name, taken in kept.items()
    }
    beside_, after_ = median["beside"], median["after"]
    parts = after_["rollout"], after_["wall"] - after_["rollout"]
    facts = {
        "same": same,
        "raw": {
            name: [{k: round(v, 4) for k, v in row.items()} for row in taken]
            for name, taken in kept.items()
        },
        "reason": f"equal prompts in every step, {tokens[0]} and {tokens[1]} tokens; one after "
        "the other a step is "
        f"{parts[0]:.2f} s of generation and {parts[1]:.2f} s of the rest",
    }
    unit = f"s (wall time, median of {STEPS})"
    yield Measurement(
        "async step, 28M: a step over its bound",
        beside_["wall"],
        max(parts),
        unit,
        "the longer of generation and the rest alone, one after the other",
        1.05,
        **facts,
    )
    yield Measurement(
        "async step, 28M: a whole step",
        beside_["wall"],
        after_["wall"],
        unit,
        OTHER,
        bound=max(parts) / sum(parts),
        bound_is="the longer of generation and the rest alone",
        **facts,
    )
    for who in ("trainer", "engine"):
        share = [one[f"{who}_waits"] for one in (beside_, after_)]
        yield Measurement(
            f"async step, 28M: the {who} waits", *share, "share of a step", OTHER, **facts
        )


def in_turns(sizes: dict[str, list[int]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The steps of each alternative by its prompts per step, which take turns; none where there is
    one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return {}
    os.sched_setaffinity(0, cores[:2])  # the children inherit it, and take one each
    rows: dict[str, dict[int, list[dict[str, Any]]]] = {
        name: {n: [] for n in sizes[name]} for name in ALTERNATIVES
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = policies.write_policy(Path(scratch) / "policy", SHAPE, stop=STOP)
        workers = {
            name: stack.enter_context(
                Stepper(sys.executable, __file__, name, scratch, str(model), *map(str, sizes[name]))
            )
            for name in rows
        }
        for _ in range(WARM_UP + STEPS):
            for name, worker in workers.items():
                for size in sizes[name]:
                    rows[name][size].append(worker.step())
    os.sched_setaffinity(0, cores)
    return rows


def _train(name: str, scratch: Path, model: Path, *sizes: int) -> None:
    """A training that takes a step when told to, and its server. ``sizes``: prompts of a step, in
    turns; of one size where a step generates the next one's.
    """
    from megatron_dcpo.config import load_config
    from megatron_dcpo.rollout.server_launch import EngineServer, server_command
    from megatron_dcpo.training.loop import train_step
    from megatron_dcpo.training.run import longest_of

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    more = [
        "rollout.engine=server",
        f"rollout.endpoint={endpoint}",
        "objective.tis_level=token",
        "optimizer.lr=0",
    ]
    more += ["parallel.sequence_packing=true"]  # ragged, and nothing computed for padding
    more += [
        "objective.entropy_coef=1e-6"
    ]  # else a group that is all wrong, as here, is not computed
    more += [
        f"rollout.max_staleness={ALTERNATIVES[name]}",
        "training.micro_batch_size=16",
        "logging.samples_interval=0",
    ]
    options = policies.overrides(model, scratch / name, max(sizes), GROUP, TOKENS, *more)
    config = load_config(str(policies.QUICKSTART / "grpo.yaml"), options)
    command = server_command(config, 1, longest_of(config), SERVER)
    trained: list[Any] = []
    with (
        EngineServer(command, endpoint, 1, 1, scratch / f"{name}.log"),
        policies.training_run(options) as run,
        run.recorder.from_step(1),
    ):
        log = run.recorder.log
        run.recorder.log = lambda step, samples, *rest: (
            trained.append(samples),
            log(step, samples, *rest),
        )
        for number, report in enumerate(steps(), 1):
            run.timers.step = number
            run.rollouts.sampler.prompts_per_step = sizes[(number - 1) % len(sizes)]
            train_step(run, number)
            row = json.loads(run.recorder.metrics_path.read_text().splitlines()[-1])
            samples, whole = trained.pop(), row["time/step"]
            waits = row["time/rollout"] + row.get("time/judge", 0.0)
            busy = row.get("time/rollout_busy", row["time/rollout"])
            report(
                rollout=busy,
                train=row["time/train"],
                trainer_waits=waits / whole,
                engine_waits=max(0.0, 1 - busy / whole),
                lengths=[len(sample.response_ids) for sample in samples],
                prompts=[sample.prompt.prompt_id for sample in samples],
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
    else:
        for measurement in measurements():
            print(measurement.line("python benchmarks/run.py async_step"))
