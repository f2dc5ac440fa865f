"""The configuration of ``dcpo sft``: supervised training on demonstrations.

``model``, ``parallel``, ``optimizer`` and ``logging`` are the sections of ``dcpo train``; the ones
below are its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_dcpo.config import checked, read
from megatron_dcpo.config.field_types import (
    STRICT,
    Columns,
    NonNegative,
    Positive,
    RowFunction,
    Thinking,
    Unread,
    check_row_function,
)
from megatron_dcpo.config.rules import check_configuration
from megatron_dcpo.config.sections import LoggingConfig, LoopConfig, RunConfig
from megatron_dcpo.config.without_effect import options_without_effect
from megatron_dcpo.errors import UserError


@dataclass(frozen=True, config=STRICT)
class DemonstrationsConfig:
    """The demonstrations, and how they become tokens."""

    path: Annotated[str, Field(min_length=1)]
    """A file of JSON lines, JSON, CSV, parquet or Arrow, several by a pattern, a folder of
    save_to_disk, or a hub data set; its rows have messages, or problem and response
    (docs/supervised.md#data).
    """
    columns: Columns = dataclasses.field(default_factory=dict)
    """As data.columns of dcpo train, {problem: question, response: solution}."""
    row: RowFunction = ""
    """As data.row of dcpo train: a function of yours that reads a row."""
    unread: Unread = "say"
    """As data.unread of dcpo train."""
    template: str = "chat"
    """How a prompt is put, as data.template of dcpo train: chat leaves it as it is."""
    thinking: Thinking = "off"
    """Whether the chat template asks for thinking, as data.thinking of dcpo train."""
    examples_per_step: Positive = 64
    """Demonstrations of a step, over all ranks."""
    max_length: Positive = 4096
    """Longest prompt and response in tokens; longer demonstrations are left out."""
    limit: NonNegative = 0
    """Only the first demonstrations of the file (0: all)."""
    shuffle: bool = True
    """Shuffle the demonstrations in every epoch; otherwise take them in the order of the file."""

    def __post_init__(self) -> None:
        check_row_function(self.columns, self.row)


@dataclass(frozen=True, config=STRICT)
class SupervisedLossConfig:
    """The loss of a token."""

    name: str = "cross_entropy"
    """Loss of a token: cross_entropy, or a function of yours, my_loss.py:token_loss
    (docs/supervised.md#a-loss-of-your-own).
    """


@dataclass(frozen=True, config=STRICT)
class SupervisedLoopConfig(LoopConfig):
    """The loop: epochs, micro-batches, checkpoints."""

    epochs: Positive = 1
    """Passes over the demonstrations."""
    steps: NonNegative = 0
    """Steps of the run, an update each, in as many passes as they take (0: as many as
    training.epochs makes).
    """


@dataclass(frozen=True, config=STRICT)
class SupervisedValidationConfig:
    """Demonstrations that are not trained on, of which the loss is measured."""

    path: str = ""
    """As data.path; empty: no validation."""
    interval: NonNegative = 0
    """Measure every N steps, before the first and after the last one too (0: never)."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class SupervisedConfig(RunConfig):
    """One supervised training; ``config.yaml`` of the run directory holds it in full."""

    data: DemonstrationsConfig
    objective: SupervisedLossConfig = dataclasses.field(default_factory=SupervisedLossConfig)
    training: SupervisedLoopConfig = dataclasses.field(default_factory=SupervisedLoopConfig)
    evaluation: SupervisedValidationConfig = dataclasses.field(
        default_factory=SupervisedValidationConfig
    )


def load_supervised(path: str | Path, overrides: Sequence[str] = ()) -> SupervisedConfig:
    """Return the configuration of a supervised training; see :func:`megatron_dcpo.config.read`."""
    return read(path, overrides, validate_supervised)


def validate_supervised(values: object, source: str = "config") -> SupervisedConfig:
    """Turn plain dictionaries into a :class:`SupervisedConfig`. Raises :class:`UserError` for the
    first thing wrong.
    """
    if not isinstance(values, dict):
        raise UserError(f"{source}: expected a mapping of sections, found {type(values).__name__}")
    for section in ("rollout", "judging"):
        if section in values:
            raise UserError(
                f"{source}: the section {section} is of dcpo train; supervised training samples "
                "nothing. Remove it"
            )
    config = checked(values, SupervisedConfig, source)
    check_configuration(config, source)
    return config


def supervised_without_effect(config: SupervisedConfig) -> list[str]:
    """Return a line for each option that was set and changes nothing in a supervised training."""
    found = options_without_effect(config)
    training = config.training
    if training.steps and training.epochs != SupervisedLoopConfig.epochs:
        found.append(f"training.epochs={training.epochs} changes nothing with training.steps")
    if config.logging.samples_interval not in (0, LoggingConfig.samples_interval):
        found.append(
            "logging.samples_interval changes nothing: supervised training samples nothing"
        )
    return found
