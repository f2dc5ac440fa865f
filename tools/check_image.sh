#!/bin/bash
# The pip lines of the Dockerfile, in their order, in an empty environment of Python 3.12; then what they installed is asked.
#
#     tools/check_image.sh [--dry-run] [DIRECTORY]
#
# DIRECTORY (default: a temporary one, removed at the end) gets the environment; PYTHON names the interpreter. --dry-run
# resolves and installs nothing; what is compiled against an installed torch is left out. In full: 9 GB, nvcc, an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
dry=
if [ "${1:-}" = --dry-run ]; then dry=--dry-run; shift; fi
if [ -n "${1:-}" ]; then
    VIRTUAL_ENV=$(realpath -m "$1")
else
    VIRTUAL_ENV=$(mktemp -d)
    trap 'rm -rf "$VIRTUAL_ENV"' EXIT
fi
"${PYTHON:-python3.12}" -m venv "$VIRTUAL_ENV"
export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} MAX_JOBS=${MAX_JOBS:-8}
test "$(python -c 'import sys; print(*sys.version_info[:2], sep=".")')" = 3.12 || {
    echo "check_image.sh: the image has Python 3.12; name such an interpreter in PYTHON" >&2
    exit 2
}
SITE_PACKAGES=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export SITE_PACKAGES

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
    echo "== $command"
    bash -euo pipefail -c "$command" </dev/null
done <<<"$steps"
if [ -n "$dry" ]; then
    echo "check_image.sh: resolved"
    exit 0
fi
python - <<'PYTHON'
from importlib.metadata import version

for name in ("torch", "vllm", "megatron-core", "transformer-engine", "flash-attn", "nvidia-cudnn-cu13", "datasets", "pytest"):
    print(f"{name:20} {version(name)}")
import torch  # noqa: E402

assert torch.version.cuda == "13.0", torch.version.cuda
PYTHON
dcpo doctor || true  # says what is missing on this machine
