#!/usr/bin/env bash
# SmolLM2-135M-Instruct as it is, untrained, with a calibrated confidence: four answers to each of 100 problems, a confidence
# fitted on them, the model served with it, three questions asked. Usage: served.sh [OUT]; a second call only asks.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/smollm2}
python=${PYTHON:-python}
dcpo=("$python" -m megatron_dcpo)

PYTHON=$python "$here/prepare.sh" "$out" tasks
mkdir -p "$out/served"
grep -E '"kind": "(chain_sum|products)' "$out/data/test.jsonl" | head -n 100 > "$out/served/problems.jsonl"
# The model boxes nothing: its last number is taken for its answer, and the prompt is the problem alone.
"${dcpo[@]}" evaluate --model "$out/base" --benchmarks "sums=$out/served/problems.jsonl" --template chat \
    --verifier "$here/last_number.py:verify" --repeats 4 --max-tokens 48 --engine transformers --out "$out/served/evaluated"
"${dcpo[@]}" calibrate --samples "$out/served/evaluated/samples.jsonl" --out "$out/served/confidence.npz"
"$python" "$here/../serve/run.py" --model "$out/base" --out "$out/served" \
    --ask "2 + 3 =" --ask "17 + 25 =" --ask "84 * 24 ="
