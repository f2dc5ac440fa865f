#!/usr/bin/env python3
"""Name, shape, dtype and SHA-256 of every tensor of a checkpoint after de-sharding.

    python tools/inspect_checkpoint.py DIR [--json] [--no-hash]

DIR is a Hugging Face directory or a Megatron torch_dist checkpoint (or the directory whose
latest_checkpointed_iteration.txt names one). Needs no GPU and little memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dcpo.conversion.inspect import inspect_checkpoint
from megatron_dcpo.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--no-hash", action="store_true", help="do not read the tensors")
    args = parser.parse_args()
    try:
        report = inspect_checkpoint(args.dir, hashes=not args.no_hash)
    except UserError as error:
        print(f"inspect_checkpoint: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, facts in report["tensors"].items():
        print(f"{facts.get('sha256', '')[:16]:16s}  {facts['dtype']:9s} {facts['shape']!s:20s} {name}")
    print(f"{report['format']}: {len(report['tensors'])} tensors, {report['bytes'] / 1e9:.3f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
