#!/usr/bin/env bash
# An environment with a tool from start to end: a Python for it, demonstrations of the form, supervised training, DCPO,
# a picture.
#   examples/tool_environment/run.sh        (about half an hour on two cores)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
test -x environments/bin/python || "$python" -m venv environments
environments/bin/python -m pip install --quiet ./examples/tool_environment/quickstart_calculator
"$python" examples/tool_environment/demonstrations.py --out runs/tool_environment
environments/bin/python examples/environments/verifiers_agent.py --rows quickstart_calculator \
  > runs/tool_environment/problems.jsonl
"$python" -m megatron_dcpo sft --config examples/tool_environment/sft.yaml --resume auto
"$python" -m megatron_dcpo train --config examples/tool_environment/dcpo.yaml --resume auto
"$python" examples/tool_environment/draw.py runs/tool_environment/dcpo
