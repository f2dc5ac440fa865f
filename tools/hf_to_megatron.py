#!/usr/bin/env python3
"""Hugging Face directory -> Megatron torch_dist checkpoint, for any TP/PP/VPP. The same as ``dcpo
convert import``.

python tools/hf_to_megatron.py --hf-path Qwen3-8B --megatron-path ckpt/qwen3-8b --verify
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dcpo.cli.convert import main

if __name__ == "__main__":
    sys.exit(main("import", __doc__))
