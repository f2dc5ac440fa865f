"""Texts of a chosen length that are made to be expensive: each repeats what some parser looks at
twice.
"""

from __future__ import annotations

from collections.abc import Callable


def _repeated(piece: str, before: str = "", behind: str = "") -> Callable[[int], str]:
    return lambda n: before + piece * max(1, n // len(piece)) + behind


# name -> text of about n characters
HOSTILE: dict[str, Callable[[int], str]] = {
    "fence, blanks, backtick": _repeated(" ", "```", "`"),
    "fence, tabs, backtick": _repeated("\t", "x\n~~~", "`"),
    "tildes, backtick": _repeated("~", behind="`"),
    "backticks, tilde, backtick": _repeated("`", behind="~`"),
    "backticks": _repeated("`"),
    "open fences": _repeated("```python\n"),
    "fences of both kinds": _repeated("```\nx\n~~~\n"),
    "indented fence": _repeated(" ", behind="```\nx\n```"),
    "many indentations": _repeated("    x\n", "    ```\n", "    ```"),
    "language in braces": _repeated("{.", "```", "\nx\n```"),
    "words behind a fence": _repeated("a ", "~~~", "\nx\n~~~"),
    "carriage returns": _repeated("\r", "```", "x"),
    "open boxes": _repeated("\\boxed{"),
    "boxes": _repeated("\\boxed{5}"),
    "box, blanks": _repeated(" ", "\\boxed", "x"),
    "box and blank": _repeated("\\boxed "),
    "box, blanks, brace": _repeated(" ", "\\boxed{", "}x"),
    "open braces": _repeated("{", "\\boxed{5}"),
    "closed braces": _repeated("}", "\\boxed{5}"),
    "escaped braces": _repeated("\\{", "\\boxed{", "}"),
    "backslashes": _repeated("\\"),
    "markers": _repeated("<conf>"),
    "parts of markers": _repeated("<conf"),
    "markers and boxes": _repeated("<conf> 1 \\boxed{5}"),
    "marker, blanks": _repeated(" ", "\\boxed{5}<conf>", "x"),
    "word, blanks": _repeated(" ", "<conf> Confidence", "x"),
    "colon, blanks": _repeated(" ", "<conf> Confidence :", "x"),
    "number, blanks": _repeated(" ", "<conf> 0.5", "x"),
    "number, blanks, end": _repeated("\t ", "<conf> 0.5"),
    "nines": _repeated("9", "\\boxed{5}\n<conf> 0."),
    "zeros": _repeated("0", "\\boxed{5}\n<conf> ", ".5"),
    "long number": _repeated("9", "\\boxed{5}\n<conf> Confidence: "),
    "many points": _repeated("1.", "<conf> "),
    "digits": _repeated("1"),
    "signs": _repeated("-"),
    "commas": _repeated("1,000,"),
    "blanks": _repeated(" ", "x", "x"),
    "newlines": _repeated("\n", "x", "x"),
    "odd spaces": _repeated("\u2028\u00a0\x1c", "x", "x"),
    "GSM8K marks": _repeated("####"),
    "GSM8K mark, blanks": _repeated(" ", "#### a", "a"),
    "request of the reference": _repeated("Also output a single line "),
    "its word": _repeated("g", "Also output a sing"),
    "its end": _repeated("CONFIDENCE ", "Also output a single line "),
    "blanks before it": _repeated(" ", "x", "Also output"),
    "open parentheses": _repeated("("),
    "open brackets": _repeated("["),
    "sums": _repeated("1+"),
    "powers": _repeated("^{2"),
    "dollars": _repeated("$"),
    "quotes": _repeated('"'),
    "triple quotes": _repeated('"""a\n'),
    "f-strings": _repeated("f'{"),
    "lambdas": _repeated("lambda:"),
    "nots": _repeated("not "),
    "program": _repeated("a=a\n"),
    "attributes": _repeated(".a", "a"),
    "markup": _repeated("<script>&"),
    "escape codes": _repeated("\x1b[31m"),
    "null bytes": _repeated("\x00"),
    "emoji": _repeated("🙂"),
    "lone surrogates": _repeated("\ud800"),
    "lone halves": _repeated("\udc00a"),
    "end tokens": _repeated("<|im_end|>"),
}
