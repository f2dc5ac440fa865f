"""The policy on Megatron-core: model, batching, log-probs, forward-backward, optimizer."""

from megatron_dcpo.runtime.megatron_on_cpu import ensure

ensure()
