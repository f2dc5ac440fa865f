"""PrimeIntellect's verifiable-coding-problems and SYNTHETIC-1: tests, or a key, in
verification_info, as JSON or as Python's repr.
"""

import ast
import json


def row(row):
    info = row["verification_info"]
    if isinstance(info, str):
        info = json.loads(info) if '":' in info[:40] else ast.literal_eval(info)
    if "test_cases" not in info:
        return {"problem": row["prompt"], "answer": info["ground_truth"]}
    if not str(info.get("language") or "python").lower().startswith("py"):
        return None  # only Python is run
    return {"problem": row["prompt"], "tests": info["test_cases"]}
