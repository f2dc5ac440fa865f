"""Devices and process groups. The only room that knows whether CUDA exists.

Import Megatron only after :func:`ensure`; every module of ``policy`` does so through ``from megatron_dcpo import runtime``
at its head, because importing this package already runs it. On a CUDA machine it changes nothing.
"""

from __future__ import annotations

from megatron_dcpo.runtime.device import backend, device, has_cuda, set_threads, synchronize
from megatron_dcpo.runtime.megatron_on_cpu import ensure

ensure()

__all__ = ["backend", "device", "ensure", "has_cuda", "set_threads", "synchronize"]
