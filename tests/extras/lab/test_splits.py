"""The lab's problems: the test's are what the fixed seed makes, and nothing is in two files or in
the supervised text.
"""

from __future__ import annotations

import hashlib
import runpy

from lab.testgrid import EXAMPLES

SPLITS = runpy.run_path(str(EXAMPLES / "make_splits.py"))
read_jsonl = SPLITS["read_jsonl"]
POLICY = runpy.run_path(str(EXAMPLES.parent / "quickstart" / "make_policy.py"))

# of the commit that made them, before anything was evaluated on them
SHA256 = {
    "test": "d63137096e390513e249a408a7ecac08c631e573d2e71ebeb22575ec8e0674cc",
    "final": "5b74ae1c8cb01bb86f98ed90b70872142eaa34107b8892f70865f2a9f50da6fe",
}


def test_the_seed_makes_the_published_test_problems(tmp_path) -> None:
    SPLITS["make_splits"](EXAMPLES / "data", tmp_path)
    for name, expected in SHA256.items():
        for path in (tmp_path / f"{name}.jsonl", EXAMPLES / "data" / f"{name}.jsonl"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == expected, path


def test_no_product_is_in_two_splits_or_in_the_supervised_text() -> None:
    products = {
        name: {tuple(sorted(p[:2])) for p in read_jsonl(EXAMPLES / "data" / f"{name}.jsonl")}
        for name in ("train", "heldout", "test", "final")
    }
    heldout, text = POLICY["given_problems"](EXAMPLES / "data")
    assert {tuple(sorted(p[:2])) for p in heldout} == products["heldout"]
    assert set(text) == set(POLICY["TYPES"])
    products["text"] = {tuple(sorted(p[:2])) for pool in text.values() for p in pool}
    names = list(products)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert not products[name] & products[other], (name, other)
