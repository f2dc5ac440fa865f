#!/usr/bin/env bash
# SmolLM2-135M-Instruct as it is, untrained, with a calibrated confidence: greedy answers to 200 sums, a confidence fitted on
# them, the model served with it, three questions asked. Usage: served.sh [OUT]; a second call evaluates nothing again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/smollm2}
python=${PYTHON:-python}
dcpo=("$python" -m megatron_dcpo)

PYTHON=$python "$here/prepare.sh" "$out" tasks
mkdir -p "$out/served"
grep -m 200 -E '"kind": "chain_sum [12]"' "$out/data/train.jsonl" > "$out/served/problems.jsonl"
# The model boxes nothing: its last number is taken for its answer, and the prompt is the problem alone. A confidence is
# fitted on answers like those that it is asked for: greedy ones.
"${dcpo[@]}" evaluate --model "$out/base" --benchmarks "sums=$out/served/problems.jsonl" --template chat \
    --verifier "$here/last_number.py:verify" --temperature 0 --repeats 1 --max-tokens 48 --engine transformers --out "$out/served/evaluated"
"${dcpo[@]}" calibrate --samples "$out/served/evaluated/samples.jsonl" --out "$out/served/confidence.npz"
asked="State the final answer to the following arithmetic problem:"
"$python" "$here/../serve/run.py" --model "$out/base" --out "$out/served" --temperature 0 \
    --ask "$asked 2 + 3 =" --ask "$asked 17 + 25 =" --ask "$asked 84 - 96 ="
