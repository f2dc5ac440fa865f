#!/bin/sh
# The starting policies of the calibration lab, from random weights, about five CPU minutes each. Two stages: the quickstart's
# (correct solutions, then imperfect ones), then text whose wrong answers are slips of the pen and whose author hesitates a
# little after one. See examples/quickstart/make_policy.py.
set -e
cd "$(dirname "$0")"
make="${PYTHON:-python3} ../quickstart/make_policy.py --mix lab --unseen --heldout 600 --more-heldout 600"
build() { # NAME options of the architecture
    name=$1
    shift
    work=$(mktemp -d)
    $make "$@" --clean-steps 2600 --imperfect-steps 400 --out "$work" --data data
    $make "$@" --clean-steps 0 --imperfect-steps 800 --hesitation 0.25 --start "$work/policy" --out "$name" --data data
    rm -r "$work"
}
[ $# -gt 0 ] || set -- qwen3 llama large
for policy in "$@"; do
    case $policy in
    qwen3) build qwen3 ;;
    llama) build llama --family llama ;;
    large) build large --layers 3 ;;
    *) echo "unknown policy $policy; known: qwen3 llama large" >&2 && exit 2 ;;
    esac
done
