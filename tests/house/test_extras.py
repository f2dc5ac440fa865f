"""``make test`` meets every folder of ``tests/extras`` a little, and every other room whole."""

from __future__ import annotations

from types import SimpleNamespace

from tests.extras.conftest import FOLDER, SMOKE, pytest_collection_modifyitems
from tests.helpers.paths import REPOSITORY


def test_every_folder_has_a_case_in_make_test() -> None:
    folders = {path.parent.name for path in (REPOSITORY / FOLDER).glob("*/__init__.py")}
    assert {name.partition("/")[0] for name in SMOKE} == folders
    for name in SMOKE:
        file, _, test = name.partition("::")
        assert f"def {test or 'test_'}" in (REPOSITORY / FOLDER / file).read_text()


def test_the_rest_of_them_is_marked_and_nothing_else() -> None:
    tests = ("unit/test_codec.py::test_a", "extras/lab/test_price.py::test_a[1]")
    tests += ("extras/lab/test_equal_data.py::test_a", "extras/examples/test_quickstart.py::test_a")
    marked: dict[str, list[object]] = {f"tests/{name}": [] for name in tests}
    items = [
        SimpleNamespace(nodeid=name, add_marker=marks.append) for name, marks in marked.items()
    ]
    pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [len(marks) for marks in marked.values()] == [0, 1, 0, 1]
