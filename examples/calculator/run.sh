#!/usr/bin/env bash
# The calculator from start to end: demonstrations of the form, supervised training, DCPO, a picture.
#   examples/calculator/run.sh        (ten to fifteen minutes on two cores)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
"$python" examples/calculator/demonstrations.py --out runs/calculator/demonstrations.jsonl
"$python" -m megatron_dcpo sft --config examples/calculator/sft.yaml --resume auto
"$python" -m megatron_dcpo train --config examples/calculator/dcpo.yaml --resume auto
"$python" examples/calculator/picture.py runs/calculator/dcpo
