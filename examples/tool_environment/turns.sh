#!/usr/bin/env bash
# The environment with a confidence at every turn, from start to end: as run.sh.
#   examples/tool_environment/turns.sh      (under an hour on two cores)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
test -x environments/bin/python || "$python" -m venv environments
environments/bin/python -m pip install --quiet ./examples/tool_environment/quickstart_calculator
start=runs/tool_environment/in_turns
"$python" examples/tool_environment/demonstrations.py --out "$start" --calls 0.6 --between 0.2
environments/bin/python examples/environments/verifiers_agent.py --rows quickstart_calculator \
  > runs/tool_environment/problems.jsonl
"$python" -m megatron_dcpo sft --config examples/tool_environment/sft.yaml --resume auto \
  run_dir=runs/tool_environment/sft_turns model.path="$start/policy" data.path="$start/demonstrations.jsonl"
"$python" -m megatron_dcpo train --config examples/tool_environment/turns.yaml --resume auto
"$python" examples/tool_environment/draw_turns.py runs/tool_environment/turns
