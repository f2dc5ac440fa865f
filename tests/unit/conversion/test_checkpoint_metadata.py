"""The one reader of checkpoint metadata: honest ones, and what it refuses."""

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path

import pytest
import torch

from megatron_dcpo.conversion import megatron_checkpoint as writer
from megatron_dcpo.conversion.checkpoint_metadata import read_metadata
from megatron_dcpo.errors import UserError
from tests.helpers.hostile_checkpoint import HOSTILE


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two tensors, one of two chunks, and an object."""
    directory = tmp_path / "iter_0000001"
    directory.mkdir()
    chunks = [
        writer.NewChunk("a", (4, 3), (start, 0), (2, 3), "float32", lambda: torch.ones(2, 3))
        for start in (0, 2)
    ]
    chunks.append(
        writer.NewChunk(
            "b", (5,), (0,), (5,), "bfloat16", lambda: torch.ones(5, dtype=torch.bfloat16)
        )
    )
    writer.write_checkpoint(directory, chunks, {"a._extra_state": None}, lambda nbytes: None)
    return directory


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_honest_one_is_read_as_torch_reads_it(checkpoint: Path, protocol: int) -> None:
    path = checkpoint / ".metadata"
    expected = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(expected, protocol=protocol))
    assert read_metadata(checkpoint) == expected


METADATA_ONLY = HOSTILE.keys() - {"code beside the tensors", "code in common.pt", "an odd number"}


@pytest.mark.parametrize("name", sorted(METADATA_ONLY))
def test_a_hostile_one_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    craft, said = HOSTILE[name]
    witness = tmp_path / "witness"
    craft(checkpoint, f"touch {witness}")
    begin = time.thread_time()
    with pytest.raises(UserError) as caught:
        read_metadata(checkpoint)
    assert re.search(said, str(caught.value)), caught.value
    assert not witness.exists()
    assert time.thread_time() - begin < 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: setattr(m.state_dict_metadata["b"], "size", torch.Size([1 << 62])),
            "not a count",
        ),
        (
            lambda m: setattr(m.state_dict_metadata["b"], "size", torch.Size([1 << 40, 1 << 40])),
            "impossible shape",
        ),
        (lambda m: setattr(m.state_dict_metadata["b"], "size", [2.0]), "not a count"),
        (lambda m: setattr(m.state_dict_metadata["b"], "size", 5), "damaged"),
        (
            lambda m: setattr(m.state_dict_metadata["b"], "size", torch.Size([4])),
            "outside its shape",
        ),
        (lambda m: setattr(m.state_dict_metadata["b"].chunks[0], "offsets", (-1,)), "not a count"),
        (
            lambda m: setattr(m.state_dict_metadata["b"].chunks[0], "offsets", (1,)),
            "outside its shape",
        ),
        (lambda m: m.state_dict_metadata["b"].chunks.append("chunk"), "odd chunk"),
        (
            lambda m: setattr(m.state_dict_metadata["b"].properties, "dtype", "float32"),
            "no element type",
        ),
        (lambda m: m.state_dict_metadata.update({3: 4}), "a tensor without a name"),
        (lambda m: m.state_dict_metadata.update({"c": 4}), "neither a tensor nor an object"),
        (lambda m: setattr(m, "storage_data", None), "no table of files"),
        (lambda m: setattr(m, "state_dict_metadata", [1]), "no table of tensors"),
        (lambda m: m.storage_data.update({1: 2}), "odd entry"),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "/etc/passwd"),
            "names the file",
        ),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", ".."),
            "names the file",
        ),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "missing"),
            "is not a file",
        ),
        (lambda m: setattr(next(iter(m.storage_data.values())), "length", 1 << 40), "is truncated"),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["x"]),
            "transformed",
        ),
    ],
)
def test_what_cannot_be_is_named(checkpoint: Path, change, said: str) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=said):
        read_metadata(checkpoint)
