"""Types of options that several sections have."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from megatron_dcpo.errors import did_you_mean
from megatron_dcpo.runtime.plugins import is_import_path

STRICT = ConfigDict(extra="forbid")
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
QUESTIONS = ("exact", "f1", "choice")
BUILT_IN = ("math", "code", *QUESTIONS)  # verifiers
COLUMNS = ("problem", "answer", "options", "answer_index", "kind", "tests")
LOCAL = ("localhost", "127.0.0.1", "::1")


def _verifier(name: str) -> str:
    if "://" in name:
        address = urlsplit(name)
        if address.scheme != "https" and (
            address.scheme != "http" or address.hostname not in LOCAL
        ):
            raise ValueError(
                "expected an https:// address; http:// is for this machine "
                "(http://localhost:PORT) alone"
            )
        if address.username or address.password or address.query:
            raise ValueError(
                "the address is shown in logs; leave the key out, and set DCPO_VERIFIER_KEY"
            )
    elif name not in BUILT_IN and not is_import_path(name):
        raise ValueError(
            "expected math, code, exact, f1, choice, an import path as my_reward.py:verify, or an "
            f"https:// address{did_you_mean(name, BUILT_IN)}"
        )
    return name


def _column(name: str) -> str:
    if name not in COLUMNS:
        raise ValueError(f"no column of ours{did_you_mean(name, COLUMNS)}")
    return name


def _word(value: object) -> object:
    """Return the word of a value that YAML reads as true or false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _names(value: object) -> object:
    """Return the names of a list that is written as one text, separated by commas."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return value


def _groups(value: object) -> object:
    """Return the meaning of a filter of groups that is written as true or false."""
    if isinstance(value, bool):
        return {True: "reasoning", False: "none"}[value]
    return value


FilterGroups = Annotated[Literal["none", "reasoning", "any"], BeforeValidator(_groups)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Thinking = Annotated[Literal["off", "on", "auto"], BeforeValidator(_word)]
VerifierName = Annotated[str, AfterValidator(_verifier)]
# from our names of columns to those of a file
Columns = dict[
    Annotated[str, AfterValidator(_column)], Annotated[str, Field(min_length=1)]
]
