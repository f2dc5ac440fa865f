"""Which process started this rank."""

from __future__ import annotations

import os
from typing import Any


def run(options: dict[str, Any]) -> dict[str, Any]:
    return {"rank": os.environ["RANK"], "parent": os.getppid()}
