#!/bin/bash
# The pip lines of the Dockerfile, in their order, in an empty environment of Python 3.12; then what they installed is asked.
#
#     tools/check_image.sh [--dry-run | --without-a-gpu] [DIRECTORY]
#
# DIRECTORY (default: a temporary one, removed at the end) gets the environment; PYTHON names the interpreter. --dry-run
# resolves and installs nothing; what is compiled against an installed torch is left out. In full: 9 GB, nvcc, an hour.
# FLASH_ATTN=1 compiles flash-attn as well. --without-a-gpu: to look at what is installed. Transformer Engine is compiled without optimization (10 minutes of a core),
# flash-attn is left out, and the package is this checkout, with what its tests need (make test-cuda-wheels).
set -euo pipefail
cd "$(dirname "$0")/.."
dry='' inspect=''
case ${1:-} in
    --dry-run) dry=1 && shift ;;
    --without-a-gpu) inspect=1 && shift ;;
esac
if [ -n "${1:-}" ]; then
    VIRTUAL_ENV=$(realpath -m "$1")
else
    VIRTUAL_ENV=$(mktemp -d)
    trap 'rm -rf "$VIRTUAL_ENV"' EXIT
fi
test "$("${PYTHON:-python3.12}" -c 'import sys; print(*sys.version_info[:2], sep=".")')" = 3.12 || {
    echo "check_image.sh: the image has Python 3.12; name such an interpreter in PYTHON" >&2
    exit 2
}
"${PYTHON:-python3.12}" -m venv "$VIRTUAL_ENV"
export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} MAX_JOBS=${MAX_JOBS:-8}
SITE_PACKAGES=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export SITE_PACKAGES

if [ -n "$inspect" ]; then
    # setup.py asks for -O3; the last one counts. It would look for a wheel that somebody has compiled first.
    printf '#!/bin/sh\nexec g++ "$@" -O0\n' >"$VIRTUAL_ENV/bin/g++-O0"
    chmod +x "$VIRTUAL_ENV/bin/g++-O0"
    export CXX="$VIRTUAL_ENV/bin/g++-O0" NVTE_PYTORCH_FORCE_BUILD=TRUE
fi

# Lines that a backslash continues are one; of the rest: what pip installs, and the environment it does so in.
steps=$(sed -e ':join' -e '/\\$/{N;s/\\\n *//;b join' -e '}' Dockerfile | grep -E '^(RUN .*pip install|ENV (CUDNN_HOME|CPATH))')
while IFS= read -r step; do
    case $step in
        ENV*)
            eval "export ${step#ENV }"
            continue
            ;;
    esac
    command=${step#RUN }
    if [ -n "$dry" ]; then
        case $command in *--no-build-isolation*)
            echo "== left out (compiled against an installed torch): $command"
            continue
            ;;
        esac
        command=${command//pip install/pip install --dry-run --quiet}
        command=${command% && dcpo --version}
    fi
    if [ -n "$inspect" ]; then
        case $command in
            *flash-attn*) continue ;;
            *'".[train,hub]"'*) command='pip install --no-cache-dir --constraint constraints.txt --editable ".[cpu,dev]"' ;;
        esac
    fi
    echo "== $command"
    bash -euo pipefail -c "$command" </dev/null
done <<<"$steps"
if [ -n "$dry" ]; then
    echo "check_image.sh: resolved"
    exit 0
fi
python - "$inspect" <<'PYTHON'
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

wrong = []
for name, pinned in re.findall(r"([\w-]+)(?:\[[^\]]*\])?==([0-9.]+)", Path("Dockerfile").read_text()):
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "left out" if name == "flash-attn" and (sys.argv[1] or not os.environ.get("FLASH_ATTN")) else ""
    print(f"{name:20} {found}")
    if found not in (pinned, "left out"):
        wrong.append(f"{name} {found} instead of {pinned}")
import torch  # noqa: E402

if torch.version.cuda != "13.0":
    wrong.append(f"torch for CUDA {torch.version.cuda}")
sys.exit(f"check_image.sh: {'; '.join(wrong)}" if wrong else 0)
PYTHON
[ -n "$inspect" ] || dcpo doctor || true  # says what is missing on this machine
