"""Types of options that several sections have."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator

from megatron_dcpo.errors import did_you_mean
from megatron_dcpo.runtime.plugins import is_import_path
from megatron_dcpo.types import SCHEMA

STRICT = ConfigDict(extra="forbid")
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
QUESTIONS = ("exact", "f1", "choice")
BUILT_IN = ("math", "code", *QUESTIONS, "forecast")  # verifiers
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
            f"expected {', '.join(BUILT_IN)}, an import path as my_reward.py:verify, or an "
            f"https:// address{did_you_mean(name, BUILT_IN)}"
        )
    return name


@dataclass(frozen=True)
class WeightedVerifier:
    """One of several verifiers that judge the same responses, and its weight, a positive number."""

    name: str
    weight: float = 1.0


def _verifier_choice(value: object) -> str | tuple[WeightedVerifier, ...]:
    """Return the verifier of a name, or the verifiers of a mapping from names to weights, which may
    also be the YAML text of one.

    A list has names of weight 1, or mappings ``{name, weight}`` as ``config.yaml`` has them.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError("expected {my_reward.py:verify: 0.7, ...}") from None
    if isinstance(value, str):
        return _verifier(value)
    members: list[WeightedVerifier] = []
    for one in _listed_verifiers(value):
        member = one if isinstance(one, WeightedVerifier) else _weighted_verifier(one)
        if any(member.name == other.name for other in members):
            raise ValueError(f"{member.name} is named twice; give it one weight")
        members.append(member)
    if not members:
        raise ValueError("no verifier is named; name one, or several with weights")
    return tuple(members)


def _listed_verifiers(value: object) -> Sequence[object]:
    """Return what names one verifier each in a mapping or a list."""
    if isinstance(value, Mapping):
        return [{"name": name, "weight": weight} for name, weight in value.items()]
    if isinstance(value, list | tuple):
        return value
    raise ValueError("expected the name of a verifier, or a mapping from names to weights")


def _weighted_verifier(one: object) -> WeightedVerifier:
    values = {"name": one} if isinstance(one, str) else one
    if not isinstance(values, Mapping) or not values.keys() <= {"name", "weight"}:
        raise ValueError(f"expected a verifier and its weight, got {one!r:.80}")
    name = values.get("name")
    weight = values.get("weight", 1.0)
    if not isinstance(name, str):
        raise ValueError(f"expected the name of a verifier, got {name!r:.80}")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight <= sys.float_info.max:
        raise ValueError(f"the weight of {name} must be a positive number, got {weight!r:.40}")
    return WeightedVerifier(_verifier(name), float(weight))


def _column(name: str) -> str:
    if name not in SCHEMA:
        raise ValueError(
            f"no name of ours{did_you_mean(name, SCHEMA)}; they are {', '.join(SCHEMA)}"
        )
    return name


def _nulls_as_empty(columns: object) -> object:
    """Return a name that YAML reads as null as an empty one."""
    if not isinstance(columns, Mapping):
        return columns
    return {ours: "" if theirs is None else theirs for ours, theirs in columns.items()}


def check_row_function(columns: Mapping[str, str], row: str) -> None:
    """Raise ValueError where columns are named for a function that reads the whole row."""
    if columns and row:
        raise ValueError(f"row={row} reads the whole row; remove columns")


def _function(path: str) -> str:
    if path and not is_import_path(path):
        raise ValueError("expected a function of yours, my_rows.py:row")
    return path


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
VerifierChoice = Annotated[str | tuple[WeightedVerifier, ...], PlainValidator(_verifier_choice)]
# from names of the schema to a file's columns
Columns = Annotated[
    dict[Annotated[str, AfterValidator(_column)], str],
    BeforeValidator(_nulls_as_empty),
]
RowFunction = Annotated[str, AfterValidator(_function)]
Unread = Literal["say", "refuse"]


def members(verifier: VerifierChoice) -> tuple[WeightedVerifier, ...]:
    """Return the verifiers that judge a response; of a name, that one alone."""
    if isinstance(verifier, str):
        return (WeightedVerifier(verifier),)
    return verifier


def gives_scores(verifier: VerifierChoice) -> bool:
    """Return whether a verifier gives scores between 0 and 1: f1, a user's, or several with
    weights; the others say right or wrong.
    """
    return verifier == "f1" or verifier not in BUILT_IN


def as_written(verifier: VerifierChoice) -> str | dict[str, float]:
    """Return a verifier as a YAML file has it: its name, or a mapping from names to weights."""
    if isinstance(verifier, str):
        return verifier
    return {member.name: member.weight for member in verifier}
