"""The weight table names the parameters of Megatron's models of Transformer Engine's layers, with
their shapes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_wheels.layers import CASES
from tests.cuda_wheels.needs import in_cuda_wheels, printed_by

pytestmark = in_cuda_wheels


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    return printed_by("layers")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes(case: str, differences: dict[str, Any]) -> None:
    compared, found = differences[case]
    assert found == []
    assert compared > 20
