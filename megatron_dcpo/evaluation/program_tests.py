"""Programs in an evaluation: the file of their tests next to ``samples.jsonl``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from megatron_dcpo.data.code_problems import pack_tests, tests_key, unpack_tests
from megatron_dcpo.data.row_files import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.verifier_kind import PackedTests
from megatron_dcpo.runtime.files import replacing
from megatron_dcpo.sandbox.tests import checked_tests


def write_tests(tests: PackedTests, path: Path) -> None:
    """Write one line per set of tests, so that the samples next to the file can be judged again
    without the benchmark's files.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "wb") as file,
        gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed_file,
    ):
        for key, packed in sorted(tests.items()):
            line = json.dumps({"key": key, "tests": unpack_tests(packed)}) + "\n"
            packed_file.write(line.encode())


def read_tests(path: Path, keys: Iterable[str]) -> dict[str, bytes]:
    """Return the tests of ``keys``. Raises :class:`UserError` if some are missing or do not match
    their key.
    """
    missing = set(keys)
    tests = {}
    if path.exists():
        for where, row in read_json_lines(path):
            checked_tests(row.get("tests"), where)
            packed = pack_tests(row["tests"])
            if row.get("key") != tests_key(packed):
                raise UserError(f"{where}: the tests do not match {row.get('key')}; evaluate again")
            if row["key"] in missing:
                tests[row["key"]] = packed
    missing -= set(tests)
    if missing:
        raise UserError(
            f"{path}: no tests for {len(missing)} problems; judging needs this file next to the "
            "samples"
        )
    return tests
