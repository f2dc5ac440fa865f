"""Whether the content of a box says that the answer is not known."""

from __future__ import annotations

import re
import string

ABSTENTIONS = frozenset(
    {
        "dont know",
        "do not know",
        "idk",
        "unknown",
        "not sure",
        "unsure",
        "i dont know",
        "i do not know",
        "i am not sure",
        "i am unsure",
        "im not sure",
        "im unsure",
    }
)
_LONGEST_ABSTENTION = 80  # characters
_TEX_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_STRAIGHT = str.maketrans("‘’´“”", "'''\"\"")


def is_abstention(answer: str | None) -> bool:
    """Return whether the content of a box says that the answer is not known."""
    if answer is None or len(answer) > _LONGEST_ABSTENTION:
        return False
    return normalize(answer.translate(_STRAIGHT)) in ABSTENTIONS


def normalize(text: str) -> str:
    """Return the text as the scripts of SQuAD and HotpotQA compare it: in lower case, without
    ASCII's punctuation, articles and repeated white space.

    Two things differ: TeX's text commands are replaced with their content, and a text of which
    nothing would be left stays as it is.
    """
    plain = without_tex(text).lower().translate(_NO_PUNCTUATION)
    return without_articles(plain) or text.strip().lower()


def without_tex(text: str) -> str:
    """Return a text with the content of TeX's text commands in their place."""
    return _TEX_TEXT.sub(r"\1", text).replace("~", " ")


def without_articles(text: str) -> str:
    """Return a text without English articles and repeated white space."""
    return " ".join(_ARTICLE.sub(" ", text).split())
