"""Engine against trainer on a GPU: logits in bf16 or fp32, the rotary kernel fused or not, as
``mismatch.py`` measures it.

    python benchmarks/mismatch_gpu.py [--tokens 32] [--pretend]

vLLM against Transformer Engine's layers; the four settings in processes of their own.
``--pretend``: on the CPU, with the transformers engine and the local layers, which have no fused
kernel, few tokens and words: that it runs, no more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from measurement import environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pretend", action="store_true")
    args = parser.parse_args()
    small = ["--engine", "transformers", "--tokens", "4", "--vocabulary", "1024"]
    size = small if args.pretend else ["--engine", "vllm", "--tokens", str(args.tokens)]
    for head in ("fp32",) if args.pretend else ("model", "fp32"):
        for fused in ("false",) if args.pretend else ("true", "false"):
            command = [
                sys.executable,
                str(Path(__file__).with_name("mismatch.py")),
                "--head",
                head,
                *size,
            ]
            command += ["--megatron", f"apply_rope_fusion={fused}"]
            done = subprocess.run(
                command, env=environment(), capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-3000:]}")
            print(
                json.dumps(
                    {"rope_fused": fused == "true", **json.loads(done.stdout.splitlines()[-1])}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
