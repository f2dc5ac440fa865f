"""DeepCoder (agentica-org/DeepCoder-Preview-Dataset), the part lcbv5: tests as LiveCodeBench has
them, the name of the function in the metadata of the row.
"""

import json


def row(row):
    tests = json.loads(row["tests"])
    name = (row.get("metadata") or {}).get("func_name")
    if name:
        tests = [{**case, "metadata": {"func_name": name}} for case in tests]
    starter = (row.get("starter_code") or "").strip()
    problem = row["problem"]
    if starter and starter not in problem:
        problem += f"\n\nComplete this:\n```python\n{starter}\n```"
    return {"problem": problem, "tests": tests}
