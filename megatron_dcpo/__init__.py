"""Megatron-DCPO: reinforcement learning from verifiable rewards that leaves language models accurate and calibrated."""

__version__ = "0.1.0"
