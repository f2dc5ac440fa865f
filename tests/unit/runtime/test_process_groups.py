"""The default process group is not bound to a device: each of Megatron's groups would be a split of
the whole world.
"""

import torch.distributed as dist

from megatron_dcpo.runtime import distributed


def test_no_device_is_bound_on_a_gpu(monkeypatch):
    seen = {}

    class Made(Exception):
        pass

    def made(backend, **options):
        seen.update(options, backend=backend)
        raise Made

    monkeypatch.setattr(distributed, "has_cuda", lambda: True)
    monkeypatch.setattr(distributed, "backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", made)
    monkeypatch.setenv("RANK", "0")
    try:
        distributed.initialize()
    except Made:
        assert seen["backend"] == "cpu:gloo,cuda:nccl"
        assert seen.get("device_id") is None
        return
    raise AssertionError("no group was made")
