"""One rank: build a policy from a checkpoint, and say what was read from it here, what was
broadcast, and whether the policy is the checkpoint's, bit for bit.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_dcpo.config import ModelConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.weights import read_once
from megatron_dcpo.weights.hf_checkpoint import HFReader, load_into
from tests.distributed.cases.common import initialize_layout, parallel_config


class Counted:
    """A tensor of a file that notes what is read of it."""

    def __init__(self, name: str, whole: Any, read: list[Any]) -> None:
        self.name, self.whole, self.read = name, whole, read

    def __getitem__(self, index: Any) -> torch.Tensor:
        values: torch.Tensor = self.whole[index]
        self.read.append([f"{self.name} {index}", values.nbytes])
        return values


def run(options: dict[str, Any]) -> dict[str, Any]:
    parallel = parallel_config(options["parallel"])
    topology = initialize_layout(parallel)
    model = ModelConfig(path=options["model"], params_dtype="fp32", transformer_impl="local")
    read: list[Any] = []
    open_slice = HFReader.slice

    def counted(self: HFReader, name: str) -> Any:
        if options.get("fails_on") == dist.get_rank():
            raise OSError(5, "Input/output error")
        return Counted(name, open_slice(self, name), read)

    with (
        mock.patch.object(HFReader, "slice", counted),
        mock.patch.object(read_once, "MESSAGE_BYTES", options["message_bytes"]),
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
    ):
        try:
            policy = build_policy(model, parallel, topology, training=False)
        except (UserError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    sent = [call.args[0].nbytes for call in broadcast.call_args_list]
    return {"read": read, "sent": sent, "same": equals_checkpoint(policy, options["model"])}


def equals_checkpoint(policy: Policy, path: str) -> bool:
    """Return whether every tensor has the bits that this rank alone reads from the files."""
    reader = HFReader(path, policy.arch)
    same = True
    for chunk, copies in enumerate(policy.copies):
        tensors = policy.parameters(chunk)
        alone = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
        load_into(reader, copies, alone)
        same &= all(torch.equal(tensor, alone[name]) for name, tensor in tensors.items())
    return same
