"""Is the boxed answer right? The last complete ``\\boxed{...}`` against the key.

| file | what it does |
|---|---|
| `equivalence.py` | are two answers the same, by normalisation (`latex.py`), shape (`answer_forms.py`) and math-verify |
| `pool.py`, `worker.py` | the same in processes of their own, with hard timeouts and a cache |
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dcpo.judging.answers import last_box
from megatron_dcpo.judging.math.pool import shared_pool


def verify_math(response_text: str, ground_truth: str) -> bool:
    """Whether the last complete box of ``response_text`` equals ``ground_truth``. No box is a wrong answer.

    The text must end before the confidence line, which is never an answer. Nothing raises: what cannot be parsed, or
    not in time, is wrong.
    """
    return verify_many([(response_text, ground_truth)])[0]


def verify_many(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """``verify_math`` of many (response text, ground truth), side by side."""
    answers = [extract_boxed(text) for text, _ in pairs]
    boxed = [(answer, key) for answer, (_, key) in zip(answers, pairs, strict=True) if answer is not None]
    verdicts = iter(equivalent_many(boxed))
    return [answer is not None and next(verdicts) for answer in answers]


def equivalent_many(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether each (answer, key) is the same number, set, expression ...; answers without their boxes."""
    return shared_pool().verify([(answer.strip(), key.strip()) for answer, key in pairs])


def extract_boxed(text: str) -> str | None:
    """Content of the complete box that opens last, None when there is none."""
    content = text.encode(errors="surrogatepass")
    box = last_box(content)
    return content[box.inner : box.end - 1].decode(errors="replace") if box else None
