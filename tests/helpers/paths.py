"""Where things lie: the checkout, its examples, the tests' fixtures, and the real data sets where
they are present.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
QUICKSTART = EXAMPLES / "quickstart"
FIXTURES = REPOSITORY / "tests" / "fixtures"

# the real benchmark and training files: DCPO_DATA, or beside the checkout
DATA = Path(os.environ.get("DCPO_DATA") or REPOSITORY.parent / "shared" / "data")
