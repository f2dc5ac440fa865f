"""What the keys of mathematics look like, which is said once at the start: a key that no answer can
equal makes its problem one that nobody solves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from megatron_dcpo.judging.math import answer_forms, latex, words
from megatron_dcpo.judging.math.equivalence import MAX_ANSWER
from megatron_dcpo.runtime.text import printable

logger = logging.getLogger(__name__)

HOPELESS = ("worked solution", "sentence", "unreadable key")
_MATHEMATICS = ("number", "expression", "set")
_SENTENCE_WORDS = 6
_WORD = re.compile(r"[A-Za-z]{2,}")
_SHOWN = 60  # characters of an example


def form_of_key(key: str) -> str:
    """Return the form of a key, in the singular."""
    key = key.strip()
    if "\n" in key:
        return "worked solution"
    spoken = latex.without_commands(key)
    if len(_WORD.findall(spoken)) >= _SENTENCE_WORDS:
        return "sentence"
    if not key or len(key) > MAX_ANSWER or not answer_forms.is_well_formed(key):
        return "unreadable key"
    if words.is_truth(key):
        return "truth value"
    if words.is_date(key):
        return "date"
    if words.is_span(key):
        return "span"
    if words.is_word(key):
        return "word"
    if answer_forms.exact_number(words.measured(latex.spell_out(key)).number) is not None:
        return "number"
    return "set" if "," in key else "expression"


def report_keys(keys: Sequence[str], source: str) -> None:
    """Log how many keys have each form, with an example of each, if not all are mathematics."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for key in keys:
        form = form_of_key(key)
        counts[form] = counts.get(form, 0) + 1
        examples.setdefault(form, printable(key)[:_SHOWN])
    if counts.keys() <= set(_MATHEMATICS):
        return
    shown = [f"{count} {form} ({examples[form]!r})" for form, count in counts.items()]
    hopeless = sum(counts.get(form, 0) for form in HOPELESS)
    remedy = "a word, a date, a span and a truth value equal themselves alone"
    if hopeless:
        remedy = (
            f"no answer equals {hopeless} of them ({', '.join(HOPELESS)}); name another column or "
            "judging.verifier=exact, f1 or one of yours"
        )
    logger.warning("%s: the keys by form: %s; %s", source, ", ".join(shown), remedy)
