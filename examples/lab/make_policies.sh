#!/bin/sh
# The starting policies of the calibration lab, from random weights, about five CPU minutes each. Two stages: the quickstart's
# (correct solutions, then imperfect ones), then text whose wrong answers are slips of the pen and whose author hesitates a
# little after one. See examples/quickstart/make_policy.py. large.N and llama.N are pretraining N of the test's policies: seed
# N, and no problem of data/ in the text (the splits: make_splits.py); these are not in git. graphs.N: of the second world.
# small.N, wide.N: pupils and teacher of docs/lab/distilled.md.
# qwen3 is in git: it made data/train.jsonl and data/heldout.jsonl, and the tests start from it.
set -e
cd "$(dirname "$0")"
build() { # NAME options of the architecture
    name=$1
    shift
    make="${PYTHON:-python3} ../quickstart/make_policy.py" clean=2600 imperfect=400 slips=800
    case $policy in
    graphs.*)
        make="${PYTHON:-python3} graphs/graphs.py" clean=450 imperfect=100 slips=200
        set -- "$@" --seed "${policy##*.}"
        ;;
    *.*) set -- "$@" --splits data --seed "${policy##*.}" ;;
    *) set -- "$@" --mix lab --unseen --heldout 600 --more-heldout 600 --data data ;;
    esac
    work=$(mktemp -d)
    $make "$@" --clean-steps "$clean" --imperfect-steps "$imperfect" --out "$work"
    $make "$@" --clean-steps 0 --imperfect-steps "$slips" --hesitation 0.25 --start "$work/policy" --out "$name"
    rm -r "$work"
}
[ $# -gt 0 ] || set -- large.1 large.2 large.3 large.4 large.5
for policy in "$@"; do
    case $policy in
    qwen3) build "$policy" ;;
    llama.[1-9]) build "$policy" --family llama ;;
    large.[1-9] | large.1[0-9]) build "$policy" --layers 3 ;;
    graphs.[1-9] | small.[1-9]) build "$policy" ;;
    wide.[1-9]) build "$policy" --layers 3 --hidden 128 --intermediate 384 ;;
    *) echo "unknown policy $policy; known: qwen3, and pretrainings: large.1, llama.1, small.1, wide.1, graphs.1" >&2 && exit 2 ;;
    esac
done
