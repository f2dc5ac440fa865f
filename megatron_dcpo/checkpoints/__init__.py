"""Saving and resuming a run in Megatron's distributed checkpoint format."""

from megatron_dcpo.runtime.megatron_on_cpu import ensure

ensure()
