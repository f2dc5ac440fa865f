"""The reading path of docs/architecture.md names modules, and lists what they import outside it."""

from __future__ import annotations

import re

from tests.helpers.paths import REPOSITORY
from tests.house.test_layers import MODULES, graph

TEXT = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## ")[1]
EVERYWHERE = ("errors", "config", "runtime")


def modules_of(table: str) -> list[str]:
    """Return the modules that the first column of a table names."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    names = [name for cell in cells for name in re.findall(r"`([\w/]+)\.py`", cell)]
    return ["megatron_dcpo." + name.replace("/", ".") for name in names]


PATH, BOUNDARY = (
    modules_of(table) for table in TEXT.split("They import these modules outside the path")
)


def test_the_path_names_modules() -> None:
    assert {"megatron_dcpo.training.loop", "megatron_dcpo.weights.reshard"} <= set(PATH)
    assert set(PATH) <= MODULES.keys()


def test_what_the_path_imports_is_on_it_or_in_the_list_of_its_boundary() -> None:
    outside = {target for module in PATH for target in graph()[module]} - set(PATH)
    outside = {
        target for target in outside if target.count(".") and target.split(".")[1] not in EVERYWHERE
    }
    assert outside == set(BOUNDARY)
