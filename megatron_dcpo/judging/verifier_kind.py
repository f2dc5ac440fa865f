"""What there is to know of a kind of verifier: how it is built, and of which answers it judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.answer_keys import is_structured
from megatron_dcpo.data.datasets import Record
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import AnswerForm, Verifier
from megatron_dcpo.types import Prompt

# the tests of programming problems by their keys, which are the ground truths
PackedTests = Mapping[str, bytes]
Problems = Sequence[Record | Prompt]


@dataclass(frozen=True)
class VerifierKind:
    """A kind of verifier.

    ``build(name, options, tests)`` returns the verifier of that name; it raises
    :class:`UserError` if there is none, or if it cannot work on this machine. ``same(a, b)`` tells
    whether two answers to one problem are the same; None: as mathematics. ``check_name(name)`` and
    ``check_problems(name, problems, source)`` raise :class:`UserError` for a name or a problem that
    it cannot judge by; the latter finds the answer in the problem or in the columns of its row.
    ``digest(name)`` is a text that differs when its code, or the user's, does; None: the code is
    this package's.
    """

    form: AnswerForm
    build: Callable[[str, JudgingConfig, PackedTests], Verifier]
    same: Callable[[str, str], bool] | None = None
    check_name: Callable[[str], object] | None = None
    check_problems: Callable[[str, Problems, str], None] | None = None
    digest: Callable[[str], str] | None = None


def check_plain_answers(name: str, problems: Problems, source: str) -> None:
    """Raise :class:`UserError` for the first answer that is the JSON text of a list or an object.
    Rows whose columns are kept, for a user's verifier or for ``data.order``, may have one; the
    built-in verifier ``name`` would compare it as it stands.
    """
    for problem in problems:
        answer = answer_in_row(problem)
        if isinstance(answer, str) and is_structured(answer):
            raise UserError(
                f"{source}: {problem.prompt_id}: the answer is the JSON text {answer!r:.60}; where "
                f"a row's columns are kept, judging.verifier={name} needs a text, a number or a "
                "list of texts"
            )


def answer_in_row(problem: Record | Prompt) -> Any:  # noqa: ANN401 - what the file holds
    """Return the answer that the kept columns of a problem's row hold, if there are any."""
    return (problem.row or {}).get("answer")
