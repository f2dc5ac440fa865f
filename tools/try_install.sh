#!/bin/sh
# Install a wheel or an sdist into an empty environment, and use it: try_install.sh PYTHON FILE
set -eu
python=$1 file=$2
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "$file"
cd "$work"  # not the checkout, which would be imported instead
printf '%s\n' '{"prediction": "\\boxed{1/2}", "reference": "0.5"}' > pairs.jsonl
"$work/venv/bin/dcpo" judge --pairs pairs.jsonl --json | grep -q '"correct": true'
"$work/venv/bin/dcpo" plan --config "$root/examples/qwen3_8b/math/dcpo.yaml" --gpus 8 --json > plan.json
"$work/venv/bin/python" -c 'from megatron_dcpo.calibration import ece; assert ece([1.0, 0.0], [1, 0]) == 0'
if "$work/venv/bin/pip" show --quiet torch 2> /dev/null; then
    echo "$file brings torch" >&2
    exit 1
fi
echo "$file: installed and used under $("$python" --version)"
