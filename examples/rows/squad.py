"""SQuAD: a passage, and several texts of which each is right; judging.verifier=exact or f1."""


def row(row):
    texts = row["answers"]["text"]
    if not texts:  # of SQuAD 2.0: the passage does not say it
        return None
    return {
        "problem": row["question"],
        "context": row["context"],
        "answer": list(dict.fromkeys(texts)),
        "form": "short",
    }
