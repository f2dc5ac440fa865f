"""MMLU's tables of CSV with names in the first line: columns A to D, the key is a letter."""


def row(row):
    return {
        "problem": row["question"],
        "options": [row[letter] for letter in "ABCD"],
        "answer": row.get("answer") or row["target"],
        "kind": row.get("subject"),
    }
