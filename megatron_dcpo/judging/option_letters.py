r"""Read the option that an answer names, by its letter, by its text, or by both.

People and models write the letter of an option in many ways: ``B``, ``(b)``, ``[B]``, ``B.``,
``**B**``, ``\textbf{(B)}\ 4``, ``B ) text``, ``B - text``, ``Option B: text``, ``The answer is B``.
A letter within a word or a sentence is none, and a letter next to the text of another option names
nothing.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

from megatron_dcpo.data.question_options import letter_index
from megatron_dcpo.judging.math import latex
from megatron_dcpo.judging.math.equivalence import quick_verdict

LONGEST_ANSWER = 10_000  # characters
_TEX_TEXT = re.compile(
    r"\\(?:text[a-z]*|math(?:rm|bf|sf|it|tt)|mbox|fbox|boxed|underline|emph|bf|rm)\s*\{([^{}]*)\}"
)
_COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_TEX_SPACE = re.compile(r"\\(?:[ ,;:!]|q?quad(?![A-Za-z])|left(?![A-Za-z])|right(?![A-Za-z]))|~")
_TEX_MATH = re.compile(r"(?<!\\)\$|\\[()\[\]]")
# marks of Markdown, quotes
_MARK = r"(?:\*{1,3}|_{1,2}|`|[\"'“”‘’«»])?"
_MARKED = re.compile(r"(\*{1,3}|_{1,2}|`|[\"'“‘«])(.+?)(?:\1|[”’»])", re.DOTALL)
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|therefore|hence|then)\b,?\s*)?"
    r"(?:(?:the|my)\s+)?(?:(?:final|correct|right|best|most\s+likely)\s+)*"
    r"(?:answer|option|choice)\b"
    r"(?:\s+(?:is|would\s+be|should\s+be|must\s+be)\b)?\s*[:=]?\s*"
)
_LEAD_OUT = re.compile(
    r"\s+is\s+(?:(?:the|my)\s+)?(?:final|correct|right|best)?\s*(?:answer|option|choice)?"
)
_HEAD = re.compile(
    rf"{_MARK}(?P<open>[(\[{{<]\s*)?{_MARK}(?P<letter>[a-z]){_MARK}"
    rf"(?P<close>\s*[)\]}}>])?{_MARK}(?P<after>(?![a-z0-9]).*)",
    re.DOTALL,
)
# what separates a letter from the text of its option
_SEPARATOR = re.compile(rf"\s*(?:[.:)\]]+{_MARK}|[-–—]+(?=\s)|[-=]>|→)\s*")
# digits, signs and formulas, in which punctuation has a meaning
_NOT_WORDS = re.compile(r"[0-9\\^_=<>+*/]|(?<![a-z])-|(?<![a-z])[a-z](?![a-z'’])")
_DENIALS = frozenset({"not", "neither", "nor", "or", "either", "isn't", "never"})
_TIGHT_DASH = re.compile(r"^[-–—]+(?=[a-z])")
_ANOTHER = re.compile(r"(?<![a-z0-9])[(\[]?[a-z][)\]:]")
_OTHER_LETTER = re.compile(r"[(\[]?[b-hj-z][)\].:,;]?(?:\s|$)|[(\[]?[ai](?:[)\].:,;]|$)")


def chosen_letter(answer: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that an answer names.

    None if it names no option, or if letter and text differ. Without ``options`` any letter counts,
    whatever text follows it.
    """
    if len(answer) > LONGEST_ANSWER:
        return None
    answer_words = option_text(answer)
    texts = [option_text(option) for option in options]
    for form in _without_phrases(answer_words):
        letter = _bare_letter(form, texts)
        if letter is not None:
            return letter
        letter = _letter_of_text(form, texts) or _letter_and_text(form, texts)
        if letter is not None:
            return letter
    return None


def bare_letter(answer: str) -> str | None:
    """Return the capital letter of an answer that is nothing but a letter."""
    return _bare_letter(option_text(answer), ())


def option_text(text: str) -> str:
    """Return the text of an option in lower case, without TeX and marks around it. Punctuation
    stays, since -5 and 5 may both be options.
    """
    text = unicodedata.normalize("NFKC", text)
    text = _TEX_SPACE.sub(" ", _TEX_MATH.sub("", _COLOR.sub("", text)))
    # commands nest, \boxed{\textbf{B}}
    for _ in range(4):
        text = _TEX_TEXT.sub(r" \1 ", text)
    text = " ".join(text.lower().split()).removesuffix(".")
    marked = _MARKED.fullmatch(text)
    if marked:
        text = marked[2].strip().removesuffix(".")
    return text


def _bare_letter(text: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a text that is a letter, in brackets perhaps or with a mark after it."""
    match = _HEAD.fullmatch(text)
    if match is None or match["after"].strip(" .:,)*_`\"'”’»"):
        return None
    return _known(match["letter"], texts)


def _letter_of_text(text: str, texts: Sequence[str]) -> str | None:
    """Return the letter of the one option with this text or, if none has it, of the one that writes
    the same otherwise. A text that two options have names neither.
    """
    for is_same in (str.__eq__, _same_text):
        places = [n for n, option in enumerate(texts) if is_same(text, option)]
        if places:
            return string.ascii_uppercase[places[0]] if len(places) == 1 else None
    return None


def _same_text(a: str, b: str) -> bool:
    """Return whether two texts without TeX's markup say the same: the same words, or the same
    number or formula in another notation. Signs and decimal points are not left out.
    """
    if quick_verdict(a, b):
        return True
    first = latex.spell_out(a)
    second = latex.spell_out(b)
    if quick_verdict(first, second):
        return True
    if _NOT_WORDS.search(a + b):
        return first.replace(" ", "") == second.replace(" ", "") != ""
    return _bare_words(a) == _bare_words(b) != ""


def _bare_words(text: str) -> str:
    return "".join(character for character in text if character.isalnum())


def _known(letter: str, texts: Sequence[str]) -> str | None:
    """Return the capital letter, None if there are options and none has this letter."""
    capital = letter.upper()
    position = letter_index(capital)
    if position is None or (texts and position >= len(texts)):
        return None
    return capital


def _without_phrases(text: str) -> list[str]:
    """Return the text, and the text without what surrounds an answer in a sentence."""
    forms = [text]
    rest = text
    # "The answer is option B"
    for _ in range(2):
        match = _LEAD_IN.match(rest)
        if match and match.end() < len(rest):
            rest = rest[match.end() :]
    for form in (rest, *_before_lead_out(rest)):
        if form not in forms:
            forms.append(form)
    return forms


def _before_lead_out(text: str) -> list[str]:
    """Return ``(b)`` of ``(b) is the correct answer``."""
    head = _HEAD.fullmatch(text)
    if head and _LEAD_OUT.fullmatch(head["after"]):
        return [text[: head.start("after")]]
    return []


def _letter_and_text(text: str, texts: Sequence[str]) -> str | None:
    """Return the letter that a text begins with, if the rest agrees with it.

    Behind a bracket, a full stop, a colon or a dash the rest must say the same as the option, in
    more or fewer words. Behind a space or a comma it must be the text of the option.
    """
    head = _HEAD.fullmatch(text)
    if head is None:
        return None
    letter = _known(head["letter"], texts)
    if letter is None:
        return None
    after = head["after"]
    separator = _SEPARATOR.match(after)
    rest = option_text(after[separator.end() :] if separator else after)
    separated = separator is not None or head["close"] is not None
    if not rest:
        return None
    if not texts:
        lists = _OTHER_LETTER.match(rest) or _ANOTHER.search(rest)
        return letter if separated and not lists else None
    position = string.ascii_uppercase.index(letter)
    own = texts[position]
    readings = [rest]
    if separator is None:
        # what follows a bracket or a space may begin with a sign: "(A) -5"
        whole = rest.lstrip(" ,;=")
        readings = [whole, _TIGHT_DASH.sub("", whole), whole.strip("()")]
    for said in readings:
        named = _letter_of_text(said, texts)
        if named is not None:
            return letter if named == letter else None
        if said == own:  # which another option has too
            return letter
    if not separated or _OTHER_LETTER.match(rest):
        return None
    others = [text for place, text in enumerate(texts) if place != position]
    return letter if _says_the_same(rest, own, others) else None


def _says_the_same(rest: str, own: str, others: Sequence[str]) -> bool:
    """Return whether a text is the beginning of an option, or has all words of the option in a row
    and then speaks of no other one.
    """
    answer_words = _words(rest)
    wanted = _words(own)
    if answer_words and answer_words == wanted[: len(answer_words)]:
        return True
    padded = f" {' '.join(answer_words)} "
    before, found, beyond = padded.partition(f" {' '.join(wanted)} ")
    if not wanted or not found:
        return False
    around = f"{before} | {beyond}"
    for text in others:
        words = " ".join(_words(text))
        if words and f" {words} " in f" {around} ":
            return False
    denied = not _DENIALS.isdisjoint(before.split())
    continued = beyond.split()[:1]
    listed = bool(continued) and continued[0] in ("or", "and", "nor")
    return not (denied or listed or _ANOTHER.search(around))


def _words(text: str) -> list[str]:
    """Return the words without the marks after them. A sign and a decimal point stay."""
    words = [word.rstrip(".,;:!?") for word in text.split()]
    return [word for word in words if word]
