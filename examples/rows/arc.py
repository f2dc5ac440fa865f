"""ARC, CommonsenseQA and OpenBookQA: choices are texts and labels, the key is one of the labels."""


def row(row):
    choices = row["choices"]
    letters = dict(zip(choices["label"], "ABCDE", strict=False))
    return {
        "problem": row.get("question") or row["question_stem"],
        "options": list(choices["text"]),
        "answer": letters[row["answerKey"]],
    }
