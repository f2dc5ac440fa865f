"""MedMCQA: a column for each option, and the index of the right one."""


def row(row):
    if row["cop"] not in (0, 1, 2, 3):  # -1 in the test set, whose keys are secret
        return None
    return {
        "problem": row["question"],
        "options": [row[column] for column in ("opa", "opb", "opc", "opd")],
        "answer": row["cop"],
        "kind": row.get("subject_name"),
    }
