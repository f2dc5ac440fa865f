"""The configuration file of a verb, ``--config``, and what overrides it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.nearby_paths import places

if TYPE_CHECKING:
    from megatron_dcpo.config import Config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and what overrides it."""
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file with the run's options"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="options that override the file"
    )


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Call ``config.load_config``. A missing file is reported before the schema and its libraries
    are imported.
    """
    if all("=" in override for override in overrides):
        check_config_exists(path)
    from megatron_dcpo.config import load_config

    return load_config(path, list(overrides))


def check_config_exists(path: str) -> None:
    """Raise :class:`UserError` if there is no such file."""
    if Path(path).is_dir():
        raise UserError(f"--config {path} is a directory; name the YAML file in it")
    if not Path(path).is_file():
        raise UserError(f"config file {path} does not exist{places(path)}")
