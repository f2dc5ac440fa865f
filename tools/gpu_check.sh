#!/bin/bash
# tests/gpu on a machine that has a GPU, torch and transformers, and neither this repository nor a network.
#
#     tools/gpu_check.sh pack [ARCHIVE]              here: the repository as committed and what such a machine lacks
#     tools/gpu_check.sh run ARCHIVE [DIRECTORY]     there: unpack, install, test; prints one summary
#     tools/gpu_check.sh runs ARCHIVE [DIRECTORY]    there: unpack, install, the ten runs of tools/gpu_runs.py in 28 minutes
#     tools/gpu_check.sh split FILE [DIRECTORY]      here: a large wheel in pieces, for a machine that takes no large files
#     tools/gpu_check.sh dry [DIRECTORY]             here: the same ten, each command looked up instead of run
#
# The script travels in the archive: there, `tar -xOf ARCHIVE repository/tools/gpu_check.sh | bash -s run ARCHIVE`.
#
# pack  ARCHIVE is build/gpu_check.tar.gz unless named, less than 60 MB. GPU_PYTHON (3.12) is the Python of the other
#       machine: wheels with compiled code are made for one. PYTHON: an interpreter with pip, to download with. Versions are
#       those of constraints.txt. torch, transformers and their dependencies are not carried, nor anything with CUDA.
# run   DIRECTORY (default: a temporary one, removed at the end) gets the repository, the packages, log and junit.xml.
#       PYTHON (python3): the interpreter that has torch. What it has already is not replaced. PYTEST: more options.
#       Ends with pytest's status: 0 also where every test was skipped, for the summary says so.
# split FILE.00, FILE.01, ... of at most PIECE (60,000,000) bytes and FILE.sha256 go into DIRECTORY (build/pieces). There, `run`
#       and `runs` join what lies in PIECES (pieces, beside the archive) and install it, sources compiled there.
#       So Transformer Engine: transformer_engine and transformer_engine_cu13 (wheels), transformer_engine_torch (sources),
#       2.11.0, by `pip download --no-deps --no-build-isolation` of a Python that has a CUDA build of torch.
set -euo pipefail

PACKAGES="annotated-types antlr4-python3-runtime contourpy cycler einops fonttools httpcore2 httpx2 hypothesis iniconfig kiwisolver
    latex2sympy2_extended markdown-it-py math-verify matplotlib mdurl megatron-core omegaconf pillow pluggy psutil pydantic
    pydantic_core Pygments pyparsing pytest pytest-timeout python-dateutil rich sentencepiece sortedcontainers
    truststore typing-inspection typing_extensions"
LARGEST=60000000 # bytes

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

pack() {
    cd "$(dirname "$0")/.."
    local archive=${1:-build/gpu_check.tar.gz} version=${GPU_PYTHON:-3.12} pins=() platforms=() name size
    case $version in [3].[0-9]*) ;; *) fail "GPU_PYTHON=$version: write it as 3.12" ;; esac
    staging=$(mktemp -d)
    trap 'rm -rf "$staging"' EXIT
    mkdir "$staging/wheels" "$staging/repository"
    [ -z "$(git status --porcelain --untracked-files=no)" ] || echo "gpu_check.sh: uncommitted changes are not packed" >&2
    git archive HEAD | tar -x -C "$staging/repository"
    git rev-parse HEAD >"$staging/commit"
    for name in $PACKAGES; do
        pins+=("$(grep -i "^$name==" constraints.txt)") || fail "constraints.txt has no version of $name"
    done
    for name in 2_28 2_27 2_24 2_17 2_12; do platforms+=(--platform "manylinux_${name}_x86_64"); done
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$staging/wheels" "${pins[@]}"
    mkdir -p "$(dirname "$archive")"
    tar -C "$staging" -czf "$archive" commit wheels repository
    size=$(stat -c %s "$archive")
    echo "$archive: $size bytes, ${#pins[@]} packages for Python $version"
    [ "$size" -lt "$LARGEST" ] || fail "$archive has $size bytes, $LARGEST are allowed"
}

split() {
    local file=${1:-} directory=${2:-build/pieces} name
    [ -f "$file" ] || fail "no such file: '$file'"
    name=$(basename "$file")
    mkdir -p "$directory"
    command split --bytes "${PIECE:-$LARGEST}" --numeric-suffixes "$file" "$directory/$name."
    (cd "$(dirname "$file")" && sha256sum "$name") >"$directory/$name.sha256"
    echo "$directory: $(find "$directory" -name "$name.[0-9]*" | wc -l) pieces of $name"
}

# joins the pieces in $1 and installs what they make into $2
install_pieces() {
    local sum name root joined=()
    for sum in "$1"/*.sha256; do
        [ -f "$sum" ] || continue
        name=$(basename "$sum" .sha256)
        cat "$1/$name".[0-9]* >"$2/$name"
        (cd "$2" && sha256sum --check --status "$sum") || fail "$name: a piece is missing or damaged in $1"
        joined+=("$2/$name")
    done
    [ "${#joined[@]}" -gt 0 ] || return 0
    root=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    # by one command: pip does not merge two packages that share a directory into a target one after the other
    CPATH="$root/cu13/include:$root/cudnn/include:$root/nccl/include:${CPATH:-}" NVTE_FRAMEWORK=pytorch \
        "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --disable-pip-version-check \
        --target "$2/site" "${joined[@]}" || fail "what was joined of $1 cannot be installed here: ${joined[*]##*/}"
    rm "${joined[@]}"
}

# unpacks and installs: sets directory and python, and the environment of what follows
prepare() {
    local archive=${1:-} missing
    python=${PYTHON:-python3}
    [ -f "$archive" ] || fail "no such archive: '$archive'; make one with: tools/gpu_check.sh pack"
    if [ -n "${2:-}" ]; then
        mkdir -p "$2"
        directory=$(cd "$2" && pwd)
    else
        directory=$(mktemp -d)
        staging=$directory
        trap 'rm -rf "$staging"' EXIT
    fi
    tar -C "$directory" -xzf "$archive"
    "$python" -c 'import torch, transformers' || fail "$python has no torch or no transformers; name another in PYTHON"
    missing=$("$python" "$directory/repository/tools/gpu_check.py" missing "$directory/wheels")
    if [ -n "$missing" ]; then
        # into a directory of its own: a virtual environment of a virtual environment's Python would not see its torch
        printf '%s\n' "$missing" | sed "s|^|$directory/wheels/|" >"$directory/missing.txt"
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check \
            --upgrade --target "$directory/site" --requirement "$directory/missing.txt"
    fi
    install_pieces "$(realpath "${PIECES:-$(dirname "$archive")/pieces}")" "$directory"
    export PYTHONPATH="$directory/repository:$directory/site" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    cd "$directory/repository"
}

runs() {
    prepare "$@"
    [ -n "${2:-}" ] || trap - EXIT # the logs are what it is for
    echo "gpu_check.sh: logs and summary.json in $directory/runs" >&2
    "$python" tools/gpu_runs.py "$directory/runs"
}

dry() {
    cd "$(dirname "$0")/.."
    "${PYTHON:-python3}" tools/gpu_runs.py "${1:-build/gpu_check_dry}" --pretend
}

run() {
    local status=0
    prepare "$@"
    # shellcheck disable=SC2086 # options, separated by spaces
    "$python" -m pytest -p no:cacheprovider -rs --junitxml="$directory/junit.xml" ${PYTEST:-} tests/gpu \
        >"$directory/log" 2>&1 || status=$?
    [ -f "$directory/junit.xml" ] || { tail -n 40 "$directory/log" >&2; fail "pytest ended with $status before its tests"; }
    [ "$status" = 0 ] || tail -c 20000 "$directory/log"
    "$python" tools/gpu_check.py summary "$directory/junit.xml" "$directory/commit"
    return "$status"
}

case ${1:-} in
    pack | run | runs | dry | split) "$@" ;;
    *) fail "usage: gpu_check.sh pack [ARCHIVE] | run ARCHIVE [DIRECTORY] | runs ARCHIVE [DIRECTORY] | split FILE [DIRECTORY] | dry [DIRECTORY]" ;;
esac
