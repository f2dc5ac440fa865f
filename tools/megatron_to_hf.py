#!/usr/bin/env python3
"""Megatron torch_dist checkpoint -> Hugging Face directory. The same as ``dcpo convert export``.

python tools/megatron_to_hf.py --megatron-path runs/x/checkpoints --hf-path out --hf-config Qwen3-8B
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dcpo.cli.convert import main

if __name__ == "__main__":
    sys.exit(main("export", __doc__))
