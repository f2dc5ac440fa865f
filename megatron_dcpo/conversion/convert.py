"""Conversion between Hugging Face directories and Megatron ``torch_dist`` checkpoints, by views of
memory-mapped files.

A checkpoint holds every tensor whole, whatever layout wrote it and whatever layout will read it, so
both directions follow the plan of a single rank. Import concatenates slices of Hugging Face tensors
into Megatron tensors; export copies slices of Megatron tensors into Hugging Face tensors. Nothing
but hashes is computed on the way.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture, read_architecture
from megatron_dcpo.config import load_config
from megatron_dcpo.conversion.common import (
    Conversion,
    PeakMemory,
    Progress,
    byte_counter,
    few_threads,
    float_dtype,
    in_threads,
    one_dtype,
    sha256,
    verify_bytes,
    write_record,
)
from megatron_dcpo.conversion.megatron_checkpoint import (
    MegatronCheckpoint,
    NewChunk,
    StoredTensor,
    as_bytes,
    find_checkpoint,
    write_checkpoint,
)
from megatron_dcpo.conversion.parameters import (
    Slice,
    extra_states,
    kinds_of_tensors,
    locate,
    megatron_shape,
    place_of,
    row_copies,
    slices,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.runtime.files import check_free_space, check_no_overlap, new_directory
from megatron_dcpo.runtime.run_records import read_launches
from megatron_dcpo.weights.hf_checkpoint import (
    INDEX,
    SHARD_BYTES,
    SINGLE_FILE,
    Carried,
    HFReader,
    Shard,
    Specs,
    assign_files,
    check_side_files,
    copy_side_files,
    plan_shards,
    read_weight_map,
    write_index,
)
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import Copy, padded_vocab_size
from megatron_dcpo.weights.table import (
    Interleaving,
    fused_parts,
    hf_shapes,
    is_constant,
    stored_names,
    stored_shapes,
)

# An imported checkpoint keeps the rest of the model here: config, tokenizer, the split into files.
HF_SUBDIRECTORY = "hf"
_CHUNK_BYTES = 2**28  # a reader loads whole chunks, even if it wants a slice


# ------------------------------------------------------------------------- Hugging Face -> Megatron


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    make_vocab_size_divisible_by: int = 128,
    tensor_model_parallel_size: int = 1,
    verify: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Conversion:
    """Write the Hugging Face directory ``source`` as the Megatron checkpoint ``target``.

    The vocabulary is padded with zeros as Megatron pads it for the two sizes given; a model with
    another padding can load it all the same. Raises :class:`UserError`, and leaves no ``target``,
    for every kind of bad input.
    """
    clock = time.perf_counter()
    with PeakMemory() as memory:
        check_no_overlap(target, source)
        arch = read_architecture(source)
        check_side_files(source)
        layout = Layout(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=1,
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        )
        padded = padded_vocab_size(arch, layout)
        reader = HFReader(source, arch)
        ignored = reader.check(arch)
        moved = list(hf_shapes(arch))
        dtype = one_dtype(
            source, {name: reader.specs[name] for name in moved if not is_constant(name)}
        )
        chunks = list(_new_chunks(arch, reader, padded))
        total = sum(math.prod(chunk.sizes) * dtype_bytes(chunk.dtype) for chunk in chunks)
        carried = Carried.of(reader, arch)
        check_free_space(target, total + carried.nbytes)
        with new_directory(target, overwrite) as temporary, few_threads() as pool:
            hashing = {
                name: pool.submit(sha256, reader.tensor(name)) for name in (*moved, *carried.specs)
            }
            write_checkpoint(
                directory=temporary,
                chunks=chunks,
                objects=extra_states(arch),
                count=byte_counter(progress, total),
            )
            hashes = {name: hashing[name].result() for name in sorted(hashing)}
            side = temporary / HF_SUBDIRECTORY
            side.mkdir()
            copy_side_files(source, side)
            carried.keep(side)
            _record_files(source, side, [*stored_shapes(arch), *carried.specs])
            seconds = time.perf_counter() - clock
            verify_seconds = None
            if verify:
                verify_seconds = verify_bytes(
                    arch=arch,
                    checkpoint=MegatronCheckpoint(temporary),
                    reader=reader,
                    progress=progress,
                )
            result = Conversion(
                direction="import",
                source=hub.exact_name(str(source)),
                target=str(target),
                architecture=arch.name,
                dtype=dtype,
                bytes_moved=total,
                seconds=seconds,
                verify_seconds=verify_seconds,
                peak_resident_bytes=memory.resident_bytes,
                peak_anonymous_bytes=memory.anonymous_bytes,
                padding={"vocab_size": arch.vocab_size, "padded_vocab_size": padded},
                ignored=ignored,
                tensors=hashes,
            )
            write_record(temporary, result)
    return result


def _new_chunks(arch: Architecture, reader: HFReader, padded: int) -> Iterator[NewChunk]:
    """Yield the checkpoint's tensors as chunks, which become views of the source when they are
    written. ``padded`` is the number of rows of the vocabulary's tensors.
    """
    kinds = kinds_of_tensors(arch)
    for megatron, copies in row_copies(arch).items():
        rows, *columns = megatron_shape(arch, copies)
        if kinds[megatron] == "vocab":
            rows = padded
        _, dtype = reader.specs[copies[0].hf]
        place = place_of(arch, megatron)
        row_bytes = math.prod(columns) * dtype_bytes(dtype)
        bounds = _chunk_bounds(kinds[megatron], rows, row_bytes)
        for start, stop in itertools.pairwise(bounds):
            sizes = ([1] * len(place.stack)) + [stop - start] + columns
            offsets = [*place.index, start] + [0] * len(columns)
            yield NewChunk(
                key=place.key,
                shape=(*place.stack, rows, *columns),
                offsets=tuple(offsets),
                sizes=tuple(sizes),
                dtype=dtype,
                make=partial(_rows, reader, copies, start, stop, tuple(sizes)),
            )


def _rows(
    reader: HFReader, copies: Sequence[Copy], start: int, stop: int, sizes: tuple[int, ...]
) -> Tensor:
    """Return rows ``start:stop`` of the Megatron tensor that ``copies`` fill, as a tensor of
    ``sizes``. Rows after the last copy are zeros.
    """
    parts = []
    for copy in copies:
        low = max(start, copy.start)
        high = min(stop, copy.start + copy.length)
        if low < high:
            shift = copy.hf_start - copy.start
            parts.append(reader.slice(copy.hf)[low + shift : high + shift])
    padding = stop - start - sum(len(part) for part in parts)
    if padding:
        some_tensor = reader.tensor(copies[0].hf)
        parts.append(torch.zeros(padding, *some_tensor.shape[1:], dtype=some_tensor.dtype))
    if len(parts) == 1:
        return parts[0].view(sizes)
    return torch.cat(parts).view(sizes)


def _chunk_bounds(kind: Interleaving, rows: int, row_bytes: int) -> list[int]:
    """Return the rows at which chunks begin, and the last row's end. Megatron reads the halves of
    gate and up separately, so no chunk spans them.
    """
    step = max(1, _CHUNK_BYTES // row_bytes)
    if kind != "gate_up":
        return [*range(0, rows, step), rows]
    half = rows // 2
    return [*range(0, half, step), *range(half, rows, step), rows]


def _record_files(source: Path, side: Path, names: Sequence[str]) -> None:
    """Keep the index of the source, or write one for a single file, so that export makes the same
    files again.
    """
    if (source / INDEX).is_file():
        shutil.copyfile(source / INDEX, side / INDEX)
        return
    index = {"weight_map": dict.fromkeys(names, SINGLE_FILE)}
    (side / INDEX).write_text(json.dumps(index))


# ------------------------------------------------------------------------- Megatron -> Hugging Face


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    hf_config: Path | None = None,
    max_shard_bytes: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Conversion:
    """Write the model of the Megatron checkpoint ``source`` as the Hugging Face directory
    ``target``. If ``source`` is the directory of a training's checkpoints, it is the latest one.

    ``hf_config`` is the directory with config and tokenizer; without it they are those that import
    left in the checkpoint. The weights are split into files as they were before import, or into
    files of at most ``max_shard_bytes``. Raises :class:`UserError`, and leaves no ``target``, for
    every kind of bad input.
    """
    clock = time.perf_counter()
    with PeakMemory() as memory:
        source = find_checkpoint(source)
        side = hf_config or _hf_directory(source)
        check_no_overlap(target, source, side)
        if not (side / "config.json").is_file():
            raise UserError(
                f"{side / 'config.json'} is missing; name the model's Hugging Face directory with "
                "--hf-config"
            )
        arch = read_architecture(side, weights_elsewhere=True)
        check_side_files(side)
        checkpoint = MegatronCheckpoint(source)
        located = locate(arch, checkpoint)
        carried = Carried.next_to_config(side, arch)
        specs = {**_hf_specs(arch, located), **carried.specs}
        dtype = float_dtype(source, specs)
        recorded = None
        if not max_shard_bytes and not hf_config:
            recorded = _recorded_files(side, specs)
        files = recorded or assign_files(specs, max_shard_bytes or SHARD_BYTES)
        shards = plan_shards(specs, files)
        total = sum(math.prod(shape) * dtype_bytes(name) for shape, name in specs.values())
        check_free_space(target, sum(shard.nbytes for shard in shards))
        with new_directory(target, overwrite) as temporary:
            hashes = _write_shards(
                out=temporary,
                arch=arch,
                specs=specs,
                shards=shards,
                parameters=itertools.chain(
                    slices(arch, checkpoint, located), _carried_slices(carried)
                ),
                count=byte_counter(progress, total),
            )
            if recorded and len(shards) > 1:
                shutil.copyfile(side / INDEX, temporary / INDEX)
            else:
                write_index(temporary, shards)
            copy_side_files(side, temporary, dtype)
            seconds = time.perf_counter() - clock
            verify_seconds = None
            if verify:
                verify_seconds = verify_bytes(
                    arch=arch,
                    checkpoint=checkpoint,
                    reader=HFReader(temporary, arch),
                    progress=progress,
                )
            result = Conversion(
                direction="export",
                source=str(source),
                target=str(target),
                architecture=arch.name,
                dtype=dtype,
                bytes_moved=total,
                seconds=seconds,
                verify_seconds=verify_seconds,
                peak_resident_bytes=memory.resident_bytes,
                peak_anonymous_bytes=memory.anonymous_bytes,
                padding={"vocab_size": arch.vocab_size},
                ignored=(),
                tensors=dict(sorted(hashes.items())),
            )
            write_record(temporary, result)
    return result


def _hf_specs(arch: Architecture, located: Mapping[str, StoredTensor]) -> Specs:
    """Return shape and element type of every Hugging Face tensor that the export writes. The parts
    of a fused one come from one Megatron parameter, which has one type.
    """
    dtypes = {}
    for megatron, copies in row_copies(arch).items():
        for copy in copies:
            dtypes[stored_names(arch)[copy.hf]] = located[megatron].dtype
    return {name: (shape, dtypes[name]) for name, shape in stored_shapes(arch).items()}


def _carried_slices(carried: Carried) -> Iterator[list[Slice]]:
    for name in carried.specs:
        yield [Slice(name=name, start=0, values=as_bytes(carried.tensor(name)))]


def _hf_directory(checkpoint: Path) -> Path:
    """Return the directory with the model's config and tokenizer: the one in the checkpoint, else
    ``model.path`` of the training that wrote it (``RUN/checkpoints/iter_N``, next to
    ``RUN/config.yaml``).
    """
    inside = checkpoint / HF_SUBDIRECTORY
    config = checkpoint.absolute().parent.parent / "config.yaml"
    if inside.is_dir() or not config.is_file():
        return inside
    with suppress(UserError):
        name = hub.recorded_name(load_config(config).model.path, read_launches(config.parent))
        return Path(hub.model_directory(name, weights=False))
    return inside


def _write_shards(
    out: Path,
    arch: Architecture,
    specs: Specs,
    shards: Sequence[Shard],
    parameters: Iterable[list[Slice]],
    count: Callable[[int], None],
) -> dict[str, str]:
    """Write every slice at its offset in the files; return the SHA-256 of each of the table's
    tensors.
    """
    descriptors: dict[str, int] = {}  # by tensor
    offsets: dict[str, int] = {}
    hashes: dict[str, str] = {}

    def write(parameter: list[Slice]) -> tuple[dict[str, str], int]:
        digests = {part.name: hashlib.sha256() for part in parameter}
        nbytes = 0
        for part in parameter:
            digests[part.name].update(part.values.numpy().data)
            data = part.values.view(-1).numpy().data
            _write_at(descriptors[part.name], data, offsets[part.name] + part.start)
            nbytes += part.values.numel()
        return {name: digest.hexdigest() for name, digest in digests.items()}, nbytes

    with ExitStack() as stack:
        for shard in shards:
            file = stack.enter_context((out / shard.file).open("wb", buffering=0))
            file.write(shard.header)
            offsets.update(shard.offsets)
            descriptors.update(dict.fromkeys(shard.offsets, file.fileno()))
        for whole, parts in fused_parts(arch).items():
            (_, *columns), dtype = specs[whole]
            row_bytes = math.prod(columns) * dtype_bytes(dtype)
            for part in parts:
                descriptors[part.name] = descriptors[whole]
                offsets[part.name] = offsets[whole] + part.first * row_bytes
        for digests, nbytes in in_threads(write, parameters):
            hashes |= digests
            count(nbytes)
    return hashes


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset = offset + written


def _recorded_files(side: Path, specs: Specs) -> dict[str, str] | None:
    """Return the file of each tensor before import, if the record has exactly these tensors."""
    if not (side / INDEX).is_file():
        return None
    files = read_weight_map(side)
    if set(files) != set(specs):
        return None
    return files
