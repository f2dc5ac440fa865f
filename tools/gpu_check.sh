#!/bin/bash
# A quarter of an hour on a bare GPU machine: what only a GPU can show, most telling first.
#
#     tools/gpu_check.sh pack ARCHIVE [TE_WHEEL]              here: what such a machine lacks, 50 MB
#     tools/gpu_check.sh run ARCHIVE RESULTS SECONDS [NAMES]  there, from this checkout: the items, in SECONDS at most
#     DRY=1 tools/gpu_check.sh run ARCHIVE|- RESULTS SECONDS  here: tests are collected, trainings are dry runs
#
# There: x86-64, a Hopper GPU, Python 3.12 with MACHINE (torch 2.11 for CUDA 13, transformers 5.17), no network.
# pack  needs pip, unzip, xz and 2 GB of disk. vLLM's libraries keep Hopper's code alone (tools/prune_fatbin.py). TE_WHEEL: of
#       transformer_engine_torch 2.11.0, compiled for that torch; without it the layers are the local ones.
# run   ARCHIVE -: nothing is unpacked. Each item has a limit, a log and a line; NAMES: only these, comma separated. PYTHON: the
#       interpreter (python3). In RESULTS lies one all.tar.gz at the end. The status is 0 if no item failed.
set -uo pipefail
# shellcheck disable=SC2034 # read by tests/unit/tools/test_gpu_check.py, with the names below
MACHINE="torch transformers httpx h11 numpy triton pytest pytest-timeout hypothesis psutil einops rich matplotlib sentencepiece packaging pyyaml"
OURS="megatron-core omegaconf antlr4-python3-runtime latex2sympy2_extended math-verify annotated-types typing-inspection pydantic
    pydantic_core httpx2 httpcore2 truststore"
ENGINE="vllm==0.32.0 msgspec cbor2 pyzmq oss-harmony openai sniffio pybase64 cachetools xgrammar==0.2.8 apache-tvm-ffi==0.1.11
    fastapi<0.137 starlette partial-json-parser llguidance<1.8 compressed-tensors==0.17.0 loguru
    cloudpickle urllib3 requests aiohttp aiosignal aiohappyeyeballs frozenlist multidict yarl propcache attrs uvloop py-cpuinfo
    prometheus-client"
LAYERS="transformer_engine==2.11.0 transformer_engine_cu13==2.11.0 onnxscript onnx onnx-ir ml_dtypes protobuf nvdlfw-inspect"
NOT_CARRIED=(vllm/vllm-rs 'vllm/third_party/deep_gemm/*' 'vllm/third_party/fmha_sm100/*' 'vllm/_flashmla*' 'vllm/_flashkda*'
    'vllm/_qutlass*' 'vllm/_deepselect*' 'vllm/vllm_flash_attn/_vllm_fa2_C*' 'transformer_engine/jax/*' '*/static/*' '*.jpg' '*.png')
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
failed=()

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

pack() {
    set -e
    local archive te_wheel pins=() there platform name wheel
    archive=$(realpath -m "${1:-$root/build/gpu_check.tar.xz}") te_wheel=${2:+$(realpath "$2")}
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/site" "$work/wheels" "$(dirname "$archive")"
    for name in $OURS; do pins+=("$(grep -i "^$name==" "$root/constraints.txt")") || fail "constraints.txt has no version of $name"; done
    there=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
    for platform in 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do there+=(--platform "manylinux_${platform}_x86_64"); done
    there+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    # shellcheck disable=SC2086 # names, separated by spaces
    "$python" -m pip download --quiet "${there[@]}" --dest "$work/wheels" "${pins[@]}" $ENGINE ${te_wheel:+$LAYERS}
    for wheel in "$work"/wheels/*.whl $te_wheel; do unzip -qo "$wheel" -d "$work/site" -x "${NOT_CARRIED[@]}" || [ $? = 11 ]; done
    find "$work/site" -name '*.so' -size +1M -exec "$python" "$root/tools/prune_fatbin.py" 90 {} +
    find "$work/site" \( -name __pycache__ -o -name tests \) -prune -exec rm -rf {} +
    tar -C "$work" -c site | xz -T0 -9e >"$archive"
    echo "$archive: $(stat -c %s "$archive") bytes"
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$1'))"; }

tests() { # FILE SELECTION
    echo "$python -m pytest -q -rs -p no:cacheprovider ${dry:+--collect-only} tests/gpu/$1 -k '$2'"
}

train() { # CONFIG OPTIONS
    echo "$python -m megatron_dcpo train --config examples/quickstart/$1 ${dry:+--dry-run} logging.to=[] training.export_hf=false ${*:2}"
}

item() { # NAME LIMIT COMMAND
    [ -z "$only" ] || [[ ,$only, == *,$1,* ]] || return 0
    local left=$((deadline - SECONDS)) began=$SECONDS limit=$2 leader status=over
    [ "$left" -ge 10 ] || { echo "$1: no time left"; return 0; }
    [ "$limit" -lt "$left" ] || limit=$left
    echo "\$ $3" >"$results/$1.log"
    setsid bash -c "$3" >>"$results/$1.log" 2>&1 &
    leader=$!
    while kill -0 "$leader" 2>/dev/null && [ $((SECONDS - began)) -lt "$limit" ]; do sleep 0.5; done
    if kill -0 "$leader" 2>/dev/null; then echo "over its $limit s" >>"$results/$1.log"; else wait "$leader"; status=$?; fi
    kill -KILL -- "-$leader" 2>/dev/null # what it left as well: its ranks hold the memory that the next one needs
    find "$work/$1" \( -name metrics.jsonl -o -name '*trace*.json*' \) -size -12M -exec cp {} "$results" \; 2>/dev/null
    printf '%-20s status %-4s %4s s  %s\n' "$1" "$status" $((SECONDS - began)) \
        "$(grep -vE '^(INFO|WARNING)' "$results/$1.log" | tail -1 | cut -c1-150)"
    [ "$status" = 0 ] || failed+=("$1")
}

items() {
    local bf16 eager model layers=local engine=transformers
    if has transformer_engine && [ -z "$dry" ]; then layers=transformer_engine; fi
    if has vllm; then engine=vllm; fi
    bf16="model.params_dtype=bf16 model.transformer_impl=$layers rollout.engine=$engine objective.tis_level=token"
    bf16+=" parallel.use_distributed_optimizer=true parallel.sequence_packing=true training.offload_optimizer_during_rollout=true"
    eager=rollout.vllm.enforce_eager=true # no minutes for kernels
    model=$work/qwen3_1.7b
    # the releases are not the pins, for which doctor ends with 1
    item machine 60 "nvidia-smi; $python -m megatron_dcpo doctor; true"
    item sampler 120 "$(tests test_engine_on_gpu.py samples_what_it_says)"
    item first_step 120 "$(tests test_training_on_gpu.py first_step)"
    item packed_is_padded 150 "$(tests test_state_on_gpu.py packed_is_padded)"
    item three_sleeps 150 "$(tests test_engine_on_gpu.py three_sleeps)"
    item quickstart 150 "$(train dcpo.yaml "$bf16" $eager training.steps=4 training.save_interval=2 "run_dir=$work/quickstart") &&
        $(train dcpo.yaml "$bf16" $eager training.steps=6 training.save_interval=2 "run_dir=$work/quickstart" --resume auto)"
    item experts 120 "$(train dcpo.yaml "$bf16" $eager model.path=examples/quickstart/moe/policy rollout.routing_replay=true \
        training.steps=4 "run_dir=$work/experts")"
    item resumption 100 "$(tests test_state_on_gpu.py resumption)"
    item large 200 "$python benchmarks/random_model.py Qwen/Qwen3-1.7B $model ${dry:+--pretend} && $(train dcpo.yaml "$bf16" $eager \
        "model.path=$model" rollout.max_response_length=512 training.max_tokens_per_micro_batch=4096 data.prompts_per_step=32 \
        training.save_interval=0 training.steps=3 'training.profile_steps=[3]' "run_dir=$work/large")"
    item graphs 200 "$(train dcpo.yaml "$bf16" training.steps=2 "run_dir=$work/graphs")"
    item leaves_the_device 120 "$(tests test_state_on_gpu.py leaves_the_device)"
    item memory 120 "$(tests test_state_on_gpu.py memory_is_what) -s"
    item closed_engine 120 "$(tests test_engine_on_gpu.py closed)"
    item evaluation 90 "$(tests test_training_on_gpu.py evaluation)"
    item in_bf16 90 "$(tests test_training_on_gpu.py in_bf16)"
    if [ -n "$dry" ] || [ $layers$engine = transformer_enginevllm ]; then
        item mismatch 200 "$python benchmarks/mismatch_gpu.py ${dry:+--pretend}"
    fi
    item host_copies 60 "$python benchmarks/host_copies.py ${dry:+--pretend}"
}

run() {
    local archive=${1:-} name
    [ $# -ge 3 ] || fail "usage: gpu_check.sh run ARCHIVE RESULTS SECONDS [NAMES]"
    [ "$archive" = - ] || [ -f "$archive" ] || fail "no such archive: '$archive'; make one with: tools/gpu_check.sh pack"
    [ "$3" -gt 0 ] 2>/dev/null || fail "SECONDS is a whole number, not '$3'"
    deadline=$((SECONDS + $3)) only=${4:-} dry=${DRY:-}
    mkdir -p "$2"
    results=$(realpath "$2") work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    [ "$archive" = - ] || tar -C "$work" -xJf "$archive" || fail "$archive cannot be unpacked"
    cd "$root" || exit 2
    export PYTHONPATH="$root:$work/site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} VLLM_NO_USAGE_STATS=1
    export VLLM_USE_FLASHINFER_SAMPLER=0 # it would be compiled
    items
    for name in "${failed[@]}"; do echo "---- $name" && tail -25 "$results/$name.log" | cut -c1-300; done
    tar -C "$results" -czf "$work/all.tar.gz" --exclude all.tar.gz . && find "$results" -mindepth 1 -delete && mv "$work/all.tar.gz" "$results"
    [ "${#failed[@]}" = 0 ]
}

case ${1:-} in
    pack | run) "$@" ;;
    *) fail "usage: gpu_check.sh pack [ARCHIVE] [TE_WHEEL] | run ARCHIVE RESULTS SECONDS [NAMES]" ;;
esac
