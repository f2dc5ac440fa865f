"""One rank of a training run on the quickstart's policy: faults are injected on request, states
hashed after each step.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import Method
from megatron_dcpo.policy.optimizer import optimizer_parts
from megatron_dcpo.runtime.distributed import topology
from megatron_dcpo.training import loop
from megatron_dcpo.training.updater import Updater
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import FEW_PROBLEMS


def digest(updater: Updater, moments: bool = True) -> str:
    """Of parameters, and with ``moments`` of the whole optimizer state, of this rank."""
    hashed = hashlib.sha256()
    for chunk in updater.trainer.policy.chunks:
        for parameter in chunk.parameters():
            hashed.update(parameter.detach().float().numpy().tobytes())
    for inner in inner_optimizers(updater.trainer.optimizer) if moments else ():
        for group in inner.param_groups:
            hashed.update(str(group.get("step", 0)).encode())
            for parameter in group["params"]:
                hashed.update(parameter.detach().float().numpy().tobytes())
                for moment in inner.state.get(parameter, {}).values():
                    hashed.update(moment.float().numpy().tobytes())
    return hashed.hexdigest()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return torch's optimizers, of the policy's parameters or of an adapter's."""
    return [part.optimizer for part in optimizer_parts(optimizer.megatron)] or [optimizer.adam]


def topology_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def forget_evaluations(path: Path) -> None:
    """What a signal leaves that comes while the last step is validated."""
    *rows, last = map(json.loads, path.read_text().splitlines())
    rows.append({key: value for key, value in last.items() if not key.startswith("evaluation/")})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(options: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    out = Path(options["out"])
    fixed = [f"run_dir={out / 'run'}", "logging.to=[]", FEW_PROBLEMS]
    config = load_config(
        QUICKSTART / f"{options.get('method', 'dcpo')}.yaml", [*fixed, *options["overrides"]]
    )
    if options.get("forget_evaluations") and topology_rank() == 0:
        forget_evaluations(Path(config.run_dir) / "metrics.jsonl")
    digests, parameters, seen = [], [], {"step": 0}
    updated, loss_of = Updater.update, Method.loss

    def update(updater, samples, scores, step, shown=0):
        if not digests:
            digests.append(digest(updater))
            parameters.append(digest(updater, moments=False))
        seen["step"] = step
        done = updated(updater, samples, scores, step, shown)
        digests.append(digest(updater))
        parameters.append(digest(updater, moments=False))
        return done

    def loss(method, *arguments):
        contributions, statistics = loss_of(method, *arguments)
        if seen["step"] in options.get("poisoned_steps", []) and topology().rank == options.get(
            "poisoned_rank", 0
        ):
            poison = float(options.get("poison", "nan"))
            shown = (
                poison if options.get("poison_shows_in_the_loss") else contributions.detach().sum()
            )
            contributions, statistics = (
                contributions * poison,
                {**statistics, "loss": torch.as_tensor(shown)},
            )
        return contributions, statistics

    Updater.update, Method.loss = update, loss
    error = None
    try:
        loop.train(config)
    except UserError as refused:
        error = str(refused)
    finally:
        Updater.update, Method.loss = updated, loss_of
    return {"digests": digests, "parameters": parameters, "error": error}
