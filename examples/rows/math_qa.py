"""MathQA: the options are one text, a ) 21 , b ) 21.5 , and the key is a small letter."""

import re


def row(row):
    options = re.split(r"\s*,?\s*\b[a-e] \) ", row["options"])[1:]
    return {"problem": row["Problem"], "options": options, "answer": row["correct"].upper()}
