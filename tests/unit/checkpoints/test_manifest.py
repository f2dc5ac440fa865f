"""The manifest of a checkpoint: every way of damaging a file is found and named."""

import contextlib
import json

import pytest

from megatron_dcpo.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    damage,
    digest,
    iteration_dir,
    iterations,
    latest_iteration,
    listed_files,
    write_manifest,
)


@pytest.fixture
def checkpoint(tmp_path):
    path = iteration_dir(tmp_path, 7)
    path.mkdir()
    for name in ("common.pt", "__0_0.distcp", "__1_0.distcp"):
        (path / name).write_bytes(name.encode() * 1000)
    write_manifest(path, 7, {file.name: digest(file) for file in path.iterdir()}, {})
    return path


def check(path):
    return damage(path, listed_files(path, 7).items())


def test_intact(checkpoint):
    assert check(checkpoint) is None


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: flip(path / "__1_0.distcp"), "__1_0.distcp has changed since it was written"),
        (
            lambda path: (path / "common.pt").write_bytes(b"common.pt" * 999),
            "common.pt has 8991 bytes instead of 9000",
        ),
        (lambda path: (path / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 bytes"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    ],
)
def test_damage_is_named(checkpoint, harm, said):
    harm(checkpoint)
    assert said in check(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"iteration": 8, "files": {}}',
        '{"iteration": 7, "files": {"a": {}}}',
        "\x00\xff",
    ],
)
def test_damaged_manifest(checkpoint, text):
    (checkpoint / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is damaged"):
        listed_files(checkpoint, 7)


def test_missing_manifest(checkpoint):
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(ValueError, match="is missing"):
        listed_files(checkpoint, 7)


def test_flipped_bit_in_the_manifest_is_found(checkpoint):
    """Wherever it falls on a name, a size or a digest."""
    path = checkpoint / MANIFEST
    text = path.read_text()
    for word in ("common.pt", '"bytes": 9', json.loads(text)["files"]["common.pt"]["sha256"]):
        at = text.index(word) + len(word) - 1
        path.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        with contextlib.suppress(ValueError):  # the manifest itself is found to be damaged
            assert check(checkpoint) is not None, word
        path.write_text(text)


def test_which_is_the_latest(tmp_path):
    assert latest_iteration(tmp_path / "nowhere") is None
    for name in ("iter_0000002", "iter_0000010", "iter_0000011.tmp", "iter_x"):
        (tmp_path / name).mkdir()
    assert iterations(tmp_path) == [2, 10]
    assert latest_iteration(tmp_path) == 10, "no announcement: the newest"
    (tmp_path / LATEST).write_text("2\n")
    assert latest_iteration(tmp_path) == 2, "what is announced counts"
    for torn in ("", "1x", "\x00\x00"):
        (tmp_path / LATEST).write_text(torn)
        assert latest_iteration(tmp_path) == 10
