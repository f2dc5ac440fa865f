"""How long before the end of its time a batch job has to be warned, so that it can end the step it
is in and save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_dcpo.planning.machine import GB
from megatron_dcpo.planning.plan import Plan, make_plan

# of --signal=B:USR1@SECONDS in the batch scripts of examples/slurm
OF_THE_SCRIPTS = 900
# What a node writes of a checkpoint in a second to the disk of all nodes: assumed, not measured.
_DISK_GBPS = 1.0
# until all ranks know of the signal, and for the processes to end
_MARGIN_SECONDS = 60


@dataclass(frozen=True)
class Lead:
    """The seconds of the longest step, every response at its longest, as far as a signal lets it go
    on; and those in which a checkpoint reaches the disk.
    """

    step: float
    save: float

    @property
    def seconds(self) -> int:
        """Return the least lead of a warning, in whole minutes."""
        return math.ceil((self.step + self.save + _MARGIN_SECONDS) / 60) * 60


def lead_of(plan: Plan) -> Lead:
    """Return the lead that ``plan`` needs. A validation is not in it."""
    longest = plan
    if plan.machine.response_tokens:
        machine = replace(plan.machine, response_tokens=0)
        longest = make_plan(plan.config, machine, plan.rates)
    seconds = longest.seconds
    step = seconds.total
    if plan.config.rollout.async_steps:
        step = seconds.beside
    elif _gives_up_a_rollout(plan):
        step -= seconds.rollout
    ranks = min(plan.machine.gpus, plan.rates.gpus_per_node)
    saved = ranks * max(stage.saved for stage in plan.stages)
    return Lead(step=step, save=saved / (_DISK_GBPS * GB))


def _gives_up_a_rollout(plan: Plan) -> bool:
    """Return whether a signal ends a rollout at the next token: an engine of one rank of the
    trainer does so. A server's requests, and an engine of several ranks, go on to their end.
    """
    if plan.config.rollout.function or plan.engine.kind == "server":
        return False
    return plan.engine.tensor_model_parallel_size == 1


def lead_line(plan: Plan) -> str:
    """Return one line on the warning of a batch script."""
    lead = lead_of(plan)
    line = (
        f"Slurm: --signal=B:USR1@{lead.seconds} at least, for {lead.step:.0f} s of a step at its "
        f"longest and {lead.save:.0f} s of a save, at {_DISK_GBPS:g} GB/s a node"
    )
    if lead.seconds > OF_THE_SCRIPTS:
        line += (
            f"; the {OF_THE_SCRIPTS} of examples/slurm are too short: sbatch "
            f"--signal=B:USR1@{lead.seconds} ..."
        )
    return line
