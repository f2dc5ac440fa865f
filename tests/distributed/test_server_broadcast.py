"""Weights to two servers in packed messages: two processes receive what the third one sends, over
gloo by the code that sends over NCCL.
"""

from __future__ import annotations

from pathlib import Path

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.weights.packed import broadcasts
from megatron_dcpo.weights.table import hf_shapes
from tests.helpers.launch import torchrun
from tests.helpers.paths import QUICKSTART

POLICY = QUICKSTART / "policy"
CUT = {"message_bytes": 10_000, "call_bytes": 40_000}


def test_the_workers_of_two_servers_unpack_the_bits_that_were_sent(tmp_path: Path) -> None:
    options = {"model": str(POLICY), **CUT}
    trainer, *workers = torchrun("server_broadcast", 3, tmp_path, options)
    arch = read_architecture(POLICY)
    planned = broadcasts(arch, itemsize=2, **CUT)
    assert planned.calls < planned.messages < len(hf_shapes(arch))
    for worker in workers:
        for came, sent in zip(worker["updates"], trainer["updates"], strict=True):
            assert sent.items() <= came.items()
        assert len(worker["received"]) == 2 * planned.messages
        assert sum(worker["received"]) == 2 * planned.nbytes
    assert trainer["sent"] == [[2 * planned.messages, 2 * planned.nbytes]] * 2
