#!/usr/bin/env bash
# The calculator with a confidence at every turn, from start to end: as run.sh.
#   examples/calculator/turns.sh      (ten to fifteen minutes on two cores)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
"$python" examples/calculator/demonstrations.py --out runs/calculator/demonstrations_turns.jsonl \
  --rows 64000 --calls 0.6 --between 0.2
"$python" -m megatron_dcpo sft --config examples/calculator/sft.yaml --resume auto \
  run_dir=runs/calculator/sft_turns data.path=runs/calculator/demonstrations_turns.jsonl
"$python" -m megatron_dcpo train --config examples/calculator/turns.yaml --resume auto
"$python" examples/calculator/picture_turns.py runs/calculator/turns
