"""Every shipped configuration gives Megatron and vLLM the arguments that it gave at commit 80ba0e8."""

from __future__ import annotations

import json

import pytest

from tests.helpers.paths import EXAMPLES, REPOSITORY
from tests.helpers.shipped_arguments import arguments

STORED = json.loads((REPOSITORY / "tests" / "fixtures" / "shipped_arguments.json").read_text())
NAMES = sorted(STORED["engine"]["of"])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_before(name: str) -> None:
    found = arguments(EXAMPLES / name)
    for kind, values in found.items():
        assert values == STORED[kind]["different"][STORED[kind]["of"][name]], kind
