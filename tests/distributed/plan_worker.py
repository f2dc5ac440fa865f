"""One rank: what it really holds, and what the plan says about it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.rank_memory import measure

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    Path(options["out"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(measure(options)))
