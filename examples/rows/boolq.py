"""BoolQ: a passage, a question, and true or false; judging.verifier=exact."""


def row(row):
    return {
        "problem": f"{row['question']}? Answer yes or no.",
        "context": row["passage"],
        "answer": "yes" if row["answer"] else "no",
        "form": "short",
    }
