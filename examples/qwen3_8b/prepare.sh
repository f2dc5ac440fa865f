#!/bin/sh
# Weights and data of the paper's run, into the current directory (about 17 GB). Needs git-lfs and the hf command of
# huggingface_hub. The training file is the one the paper's authors published: 10,000 DeepScaleR problems.
set -e
hf download Qwen/Qwen3-8B --local-dir Qwen/Qwen3-8B
test -f deepscaler_uniform_train.parquet || {
    git clone --depth 1 https://github.com/icip-cas/DCPO.git dcpo_release
    cp dcpo_release/data/deepscaler_uniform_train.parquet .
}
for preset in dcpo verl_compat; do
    dcpo train --config "$(dirname "$0")/math/$preset.yaml" --dry-run
done
