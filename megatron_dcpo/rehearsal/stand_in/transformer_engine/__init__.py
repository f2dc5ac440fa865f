"""Transformer Engine without a GPU: the parts that Megatron-core's layers use, computed in plain
torch on the CPU; of a rehearsal's tensors, which hold nothing, the shapes alone (``shapes.py``).

Constructors and ``forward`` take the arguments of the real package, no others (``signatures.json``,
made from its source by ``tools/transformer_engine_signatures.py``). What is here computes in full
precision: it shows that our code and Megatron's spec fit together (names, shapes, layouts, extra
state), and nothing of the real kernels.
"""

from transformer_engine import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
