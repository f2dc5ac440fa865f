"""``training.profile_steps``: a trace of the steps asked for, of the first rank."""

import gzip
import json
from types import SimpleNamespace

import torch

from megatron_dcpo.training.loop import _traced


def test_a_trace_of_the_steps_asked_for(tmp_path):
    config = SimpleNamespace(training=SimpleNamespace(profile_steps=(2,)))
    for step, rank in ((1, 0), (2, 0), (2, 1)):
        policy = SimpleNamespace(topology=SimpleNamespace(rank=rank))
        run = SimpleNamespace(config=config, policy=policy, directory=tmp_path / str(rank))
        with _traced(run, step):
            torch.ones(8) @ torch.ones(8)
    (path,) = tmp_path.rglob("*.json.gz")
    assert path == tmp_path / "0" / "profile" / "step_000002.json.gz"
    assert "aten::dot" in {
        event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
