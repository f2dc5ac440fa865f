#!/bin/bash
# Seven minutes on a bare GPU machine: what only a GPU can show, most telling first; more with more time.
#
#     tools/gpu_check.sh pack ARCHIVE [TE_WHEEL]              here: what such a machine lacks, 43 MB
#     tools/gpu_check.sh run ARCHIVE RESULTS SECONDS [NAMES]  there, from this checkout: the items, in SECONDS at most
#     DRY=1 tools/gpu_check.sh run ARCHIVE|- RESULTS SECONDS  here: tests are collected, trainings are dry runs
#
# There: x86-64, a Hopper GPU, Python 3.12 with MACHINE (torch 2.11 for CUDA 13, transformers 5.17), no network.
# pack  needs pip, unzip, xz and 2 GB of disk. vLLM's libraries keep Hopper's code alone (tools/prune_fatbin.py). TE_WHEEL: of
#       transformer_engine_torch 2.11.0, compiled for that torch; without it the layers are the local ones. Archive and project
#       together have at most MOST bytes, or pack fails.
# run   ARCHIVE -: nothing is unpacked. Each item has a limit, a log and a line; NAMES: only these, comma separated. PYTHON: the
#       interpreter (python3). RESULTS holds summary.txt, the items' lines, and at the end, however it comes, one all.tar.gz; if
#       it is killed outright, the logs as far as they got. The status is 0 if no item failed.
set -uo pipefail
# shellcheck disable=SC2034 # read by tests/extras/tools/test_gpu_check.py, with the names below
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
MOST=$((64 << 20))
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
failed=()

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

pack() {
    set -e
    local archive te_wheel pins=() there platform name wheel bytes
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
    for wheel in "$work"/wheels/*.whl $te_wheel; do
        unzip -qo "$wheel" -d "$work/site" -x "${NOT_CARRIED[@]}" 2> >(grep -v '^caution: excluded' >&2) || [ $? = 11 ]
    done
    find "$work/site" -name '*.so' -size +1M -exec "$python" "$root/tools/prune_fatbin.py" 90 {} +
    find "$work/site" \( -name __pycache__ -o -name tests \) -prune -exec rm -rf {} +
    tar -C "$work" -c site | xz -T0 -9e >"$archive"
    bytes=$(($(stat -c %s "$archive") + $(git -C "$root" archive HEAD | gzip | wc -c)))
    echo "$archive: $(stat -c %s "$archive") bytes, $bytes with the project"
    [ "$bytes" -le "$MOST" ] || fail "more than $MOST bytes with the project"
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$1'))"; }

tests() { # FILE SELECTION
    echo "$python -m pytest -q -rs -p no:cacheprovider ${dry:+--collect-only} tests/gpu/$1 -k '$2'"
}

train() { # CONFIG OPTIONS
    echo "$python -m megatron_dcpo train --config examples/quickstart/$1 ${dry:+--dry-run} logging.to=[] ${*:2}"
}

item() { # NAME LIMIT COMMAND
    [ -z "$only" ] || [[ ,$only, == *,$1,* ]] || return 0
    local left=$((deadline - SECONDS)) began=$SECONDS limit=$2 status=over
    [ "$left" -ge 10 ] || { say "$1: no time left"; return 0; }
    [ "$limit" -lt "$left" ] || limit=$left
    echo "\$ $3" >"$results/$1.log"
    setsid bash -c "$3" >>"$results/$1.log" 2>&1 &
    running=$! item=$1
    while kill -0 "$running" 2>/dev/null && [ $((SECONDS - began)) -lt "$limit" ]; do sleep 0.5; done
    if kill -0 "$running" 2>/dev/null; then echo "over its $limit s" >>"$results/$1.log"; else wait "$running"; status=$?; fi
    stop
    say "$(printf '%-20s status %-4s %4s s  %s' "$1" "$status" $((SECONDS - began)) \
        "$(grep -vE '^(INFO|WARNING|$)' "$results/$1.log" | tail -1 | cut -c1-300)")"
    [ "$status" = 0 ] || failed+=("$1")
}

say() { echo "$1" | tee -a "$results/summary.txt"; }

stop() { # the item that runs, with all that it left: its ranks hold the memory that the next one needs
    local file
    [ -n "$running" ] || return 0
    kill -KILL -- "-$running" 2>/dev/null
    running=""
    find "$work/$item" \( -name metrics.jsonl -o -name '*trace*.json*' \) -size -12M 2>/dev/null | while read -r file; do
        cp "$file" "$results/$(realpath --relative-to="$work" "$file" | tr / .)"
    done
}

finish() { # on every way out: one archive of what there is
    stop
    tar -C "$results" -czf "$work/all.tar.gz" --exclude all.tar.gz --exclude summary.txt . &&
        find "$results" -mindepth 1 ! -name summary.txt -delete && mv "$work/all.tar.gz" "$results"
    rm -rf "$work"
}

beside() { # OPTIONS: ten steps of the quickstart on the GPU, and on this machine's CPU at the same time; then both, side by side
    local gpu=$work/ten_steps/gpu cpu=$work/ten_steps/cpu ten="training.steps=10 training.save_interval=0"
    echo "CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(train dcpo.yaml model.transformer_impl=local "$ten" "run_dir=$cpu") >$results/ten_steps_cpu.log 2>&1 & cpu=\$!
        $(train dcpo.yaml "$*" "$ten" "run_dir=$gpu"); status=\$?
        timeout 30 tail --pid=\$cpu -f /dev/null; kill \$cpu 2>/dev/null
        $python tools/beside.py ${dry:+--help} $gpu/metrics.jsonl $cpu/metrics.jsonl && exit \$status"
}

items() {
    local bf16 eager model layers=local engine=transformers
    if has transformer_engine && [ -z "$dry" ]; then layers=transformer_engine; fi
    if has vllm; then engine=vllm; fi
    bf16="model.params_dtype=bf16 model.transformer_impl=$layers rollout.engine=$engine objective.tis_level=token"
    bf16+=" parallel.use_distributed_optimizer=true parallel.sequence_packing=true training.offload_optimizer_during_rollout=true"
    eager=rollout.vllm.enforce_eager=true # no minutes for kernels
    model=$work/qwen3_1.7b
    # these six in 430 s, by their limits; the releases are not the pins, for which doctor ends with 1
    item machine 40 "nvidia-smi; $python -m megatron_dcpo doctor
        nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader; true"
    item sampler 90 "$(tests test_engine_on_gpu.py 'samples_what_it_says and bf16')"
    item first_step 70 "$(tests test_training_on_gpu.py first_step)"
    item packed_is_padded 70 "$(tests test_state_on_gpu.py "packed_is_padded and others and $layers")"
    item colocated 65 "$(train dcpo.yaml "$bf16" $eager training.steps=1 training.save_interval=0 "run_dir=$work/colocated")"
    item ten_steps 95 "$(beside "$bf16" $eager)"
    # then
    item three_sleeps 150 "$(tests test_engine_on_gpu.py 'three_sleeps and eager')"
    item experts 120 "$(train dcpo.yaml "$bf16" $eager model.path=examples/quickstart/moe/policy rollout.routing_replay=true \
        training.steps=4 "run_dir=$work/experts")"
    item quickstart 150 "$(train dcpo.yaml "$bf16" $eager training.steps=4 training.save_interval=2 "run_dir=$work/quickstart") &&
        $(train dcpo.yaml "$bf16" $eager training.steps=6 training.save_interval=2 "run_dir=$work/quickstart" --resume auto)"
    item resumption 100 "$(tests test_state_on_gpu.py resumption)"
    item packed_everywhere 150 "$(tests test_state_on_gpu.py "packed_is_padded and not (others and $layers)")"
    item large 200 "$python benchmarks/random_model.py Qwen/Qwen3-1.7B $model ${dry:+--pretend} && $(train dcpo.yaml "$bf16" $eager \
        "model.path=$model" rollout.max_response_length=512 training.max_tokens_per_micro_batch=4096 data.prompts_per_step=32 \
        training.save_interval=0 training.steps=3 'training.profile_steps=[3]' "run_dir=$work/large")"
    item leaves_the_device 120 "$(tests test_state_on_gpu.py leaves_the_device)"
    item memory 120 "$(tests test_state_on_gpu.py memory_is_what) -s"
    item closed_engine 120 "$(tests test_engine_on_gpu.py 'closed_engine and not graphs')"
    item sampler_fp32 90 "$(tests test_engine_on_gpu.py 'samples_what_it_says and fp32')"
    item evaluation 90 "$(tests test_training_on_gpu.py evaluation)"
    item in_bf16 90 "$(tests test_training_on_gpu.py in_bf16)"
    if [ -n "$dry" ] || [ $layers$engine = transformer_enginevllm ]; then
        item mismatch 200 "$python benchmarks/mismatch_gpu.py ${dry:+--pretend}"
    fi
    item host_copies 60 "$python benchmarks/host_copies.py ${dry:+--pretend}"
    # graphs are compiled and captured
    item graphs 200 "$(train dcpo.yaml "$bf16" training.steps=2 "run_dir=$work/graphs")"
    item three_sleeps_graphs 250 "$(tests test_engine_on_gpu.py 'three_sleeps and graphs')"
    item closed_graphs 250 "$(tests test_engine_on_gpu.py 'closed_engine and graphs')"
}

run() {
    local archive=${1:-} name
    [ $# -ge 3 ] || fail "usage: gpu_check.sh run ARCHIVE RESULTS SECONDS [NAMES]"
    [ "$archive" = - ] || [ -f "$archive" ] || fail "no such archive: '$archive'; make one with: tools/gpu_check.sh pack"
    [ "$3" -gt 0 ] 2>/dev/null || fail "SECONDS is a whole number, not '$3'"
    deadline=$((SECONDS + $3)) only=${4:-} dry=${DRY:-} running=""
    mkdir -p "$2"
    results=$(realpath "$2") work=$(mktemp -d)
    rm -f "$results/summary.txt"
    trap finish EXIT
    trap 'exit 143' INT TERM HUP
    # not every such machine has a program xz
    [ "$archive" = - ] || "$python" -m tarfile -e "$archive" "$work" 2>/dev/null || fail "$archive cannot be unpacked"
    cd "$root" || exit 2
    export PYTHONPATH="$root:$work/site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} VLLM_NO_USAGE_STATS=1
    export VLLM_USE_FLASHINFER_SAMPLER=0 # it would be compiled
    cudnn=$("$python" -c "import importlib.util as u; print(u.find_spec('nvidia.cudnn').submodule_search_locations[0])" 2>/dev/null)
    # where Transformer Engine looks first: two releases of cuDNN in one process do not work together
    [ -z "$cudnn" ] || export CUDNN_HOME="$cudnn" CUDNN_PATH="$cudnn"
    items
    for name in "${failed[@]}"; do echo "---- $name" && tail -25 "$results/$name.log" | cut -c1-300; done
    [ "${#failed[@]}" = 0 ]
}

case ${1:-} in
    pack | run) "$@" ;;
    *) fail "usage: gpu_check.sh pack [ARCHIVE] [TE_WHEEL] | run ARCHIVE RESULTS SECONDS [NAMES]" ;;
esac
