"""The policy on Megatron-core: model, batching, log-probs, forward-backward, optimizer."""

from megatron_dcpo.runtime import ensure

ensure()
