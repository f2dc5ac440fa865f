#!/bin/bash
# Installs this checkout into an environment that keeps what it has: an NVIDIA image with its own torch, Megatron-core,
# Transformer Engine and Apex. Only what is missing is added, without its dependencies, at the versions of constraints.txt.
#
#     tools/install_beside.sh [SOURCE]
#
# SOURCE: this checkout, or a wheel of it. PYTHON (python3): the image's interpreter. PIP: how it installs. SITE_PACKAGES: where
# to look instead of the interpreter's own path. What is there and does not suit is named before anything is installed (status 2).
set -euo pipefail
cd "$(dirname "$0")/.."
source=${1:-.}
python=${PYTHON:-python3}
read -r -a pip <<<"${PIP:-$python -m pip}"
kept=$(mktemp)
trap 'rm -f "$kept"' EXIT

beside() {
    "$python" tools/install_beside.py "$@" ${SITE_PACKAGES:+--path "$SITE_PACKAGES"}
}

# an NVIDIA image constrains every pip by /etc/pip/constraint.txt, also to versions of packages that it does not have
install() {
    PIP_CONSTRAINT='' "${pip[@]}" --quiet --disable-pip-version-check install --no-deps --constraint "$kept" "$@"
}

beside kept >"$kept"
beside check pyproject.toml
install --no-build-isolation "$source"
while missing=$(beside missing constraints.txt "$kept") && [ -n "$missing" ]; do
    echo "install_beside.sh: adding ${missing//$'\n'/ }"
    # shellcheck disable=SC2086 # requirements, one a line
    install $missing
done
beside check pyproject.toml  # the image's Transformer Engine and a Megatron-core that was added
beside same "$kept"
beside note "$kept"
