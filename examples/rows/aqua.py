"""AQuA-RAT: options begin with their letters, A)21."""


def row(row):
    return {
        "problem": row["question"],
        "options": [option.partition(")")[2].strip() for option in row["options"]],
        "answer": row["correct"],
    }
