"""Megatron-DCPO: reinforcement learning from verifiable rewards that leaves language models
accurate and calibrated.
"""

__version__ = "0.2.0"
