"""Conversion between Hugging Face directories and Megatron ``torch_dist`` checkpoints, by streams of bytes.

A checkpoint holds every tensor whole, whatever layout wrote it and whatever layout will read it; so both directions follow
the plan of a single rank. Import concatenates slices of Hugging Face tensors to Megatron tensors, export concatenates slices
of Megatron tensors to Hugging Face tensors, and nothing is computed on the way but hashes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dcpo import __version__
from megatron_dcpo.conversion.lazy import Files, LazyTensor, concatenate, contiguous, open_files
from megatron_dcpo.conversion.memory import PeakMemory
from megatron_dcpo.conversion.torch_dist import (
    CheckpointWriter,
    StoredTensors,
    find_checkpoint,
    model_tensors,
    read_checkpoint,
)
from megatron_dcpo.conversion.transfer import Output, Stream, transfer
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.files import new_directory, require_apart, require_space
from megatron_dcpo.weights.architecture import Architecture, read_architecture
from megatron_dcpo.weights.hf_checkpoint import (
    INDEX,
    SHARD_BYTES,
    SINGLE_FILE,
    Specs,
    assign_files,
    check_shapes,
    copy_side_files,
    plan_shards,
    read_tensors,
    read_weight_map,
    write_index,
)
from megatron_dcpo.weights.planner import Coordinates, Copy, Layout, interleavings, padded_vocab_size, plan
from megatron_dcpo.weights.table import LOCAL_NAMES, Interleaving, hf_shapes

# What the model is besides its weights (config, tokenizer, the split into files), kept in an imported checkpoint.
HF_SUBDIRECTORY = "hf"
_FLOATS = ("bfloat16", "float16", "float32")
_CHUNK_BYTES = 2**29  # a reader loads chunks whole, also when it wants a slice
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "decoder.layers."
# Modules whose (empty) extra state Megatron expects in a checkpoint, in the local or the Transformer Engine spec.
_EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_EXTRA_STATES_QK = ("self_attention.q_layernorm", "self_attention.k_layernorm")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did; written as ``conversion.json`` into its result.

    ``tensors``: SHA-256 of every Hugging Face tensor that was moved. ``seconds`` without verification.
    """

    direction: str
    source: str
    target: str
    architecture: str
    dtype: str
    bytes_moved: int
    seconds: float
    verify_seconds: float | None
    peak_resident_bytes: int
    peak_anonymous_bytes: int
    padding: dict[str, int]
    ignored: tuple[str, ...]
    tensors: dict[str, str] = field(repr=False)
    version: str = __version__


# ------------------------------------------------------------------------------------------- Hugging Face -> Megatron


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

    The vocabulary is padded with zeros as Megatron pads it for the two sizes given; a model of another padding loads
    it all the same. Raises :class:`UserError`, and leaves no ``target``, for every kind of bad input.
    """
    clock, memory = time.perf_counter(), PeakMemory()
    with memory, open_files() as files:
        require_apart(target, source)
        arch = read_architecture(source)
        layout = Layout(tensor_model_parallel_size, 1, 1, make_vocab_size_divisible_by)
        padded = padded_vocab_size(arch, layout)
        tensors = read_tensors(source)
        check_shapes(source, tensors, arch)
        dtype = _one_dtype(source, {name: tensors[name] for name in hf_shapes(arch)})
        ignored = _ignored(files, source, arch, tensors)
        with new_directory(target, overwrite) as temporary:
            writer = CheckpointWriter(temporary)
            _plan_import(arch, tensors, padded, writer)
            require_space(target, writer.nbytes)
            writer.create_files()
            hashes = transfer(files, writer.streams, _counter(progress, sum(s.nbytes for s in writer.streams)))
            side = temporary / HF_SUBDIRECTORY
            side.mkdir()
            copy_side_files(source, side)
            _record_files(source, side, arch)
            writer.finish()
            seconds, checked = time.perf_counter() - clock, None
            if verify:
                checked = _verify(hashes, megatron_to_hf(arch, temporary, read_checkpoint(temporary)), progress)
            result = Conversion(
                direction="import",
                source=str(source),
                target=str(target),
                architecture=arch.name,
                dtype=dtype,
                bytes_moved=sum(stream.nbytes for stream in writer.streams),
                seconds=seconds,
                verify_seconds=checked,
                padding={"vocab_size": arch.vocab_size, "padded_vocab_size": padded},
                ignored=ignored,
                tensors=dict(sorted(hashes.items())),
                peak_resident_bytes=memory.resident_bytes,
                peak_anonymous_bytes=memory.anonymous_bytes,
            )
            _write_record(temporary, result)
    return result


def _plan_import(arch: Architecture, tensors: Mapping[str, LazyTensor], padded: int, writer: CheckpointWriter) -> None:
    kinds = _interleavings(arch)
    for megatron, copies in _copies(arch).items():
        parts = [(copy.hf, _slice(tensors[copy.hf], copy.hf_start, copy.hf_stop, copy.dim)) for copy in copies]
        rows = sum(part.rows for _, part in parts)
        if kinds[megatron] == "vocab" and padded > rows:
            head = parts[0][1]
            parts.append(("", contiguous((padded - rows, *head.shape[1:]), head.dtype, None)))
            rows = padded
        key, layer = _checkpoint_key(megatron)
        stack = None if layer is None else (layer, arch.num_layers)
        writer.add(key, stack, parts, _chunk_bounds(kinds[megatron], rows, parts[0][1].row_bytes))
    modules = _EXTRA_STATES + (_EXTRA_STATES_QK if arch.qk_layernorm else ())
    for layer in range(arch.num_layers):
        for module in modules:
            writer.add_object(f"{_LAYER}{module}._extra_state/shard_{layer}_{arch.num_layers}", None)
    writer.add_object("decoder.final_layernorm._extra_state/shard_0_1", None)


def _chunk_bounds(kind: Interleaving, rows: int, row_bytes: int) -> list[int]:
    """Megatron reads the halves of gate and up apart; otherwise whole tensors up to a size."""
    step = max(1, _CHUNK_BYTES // row_bytes)
    halves = [(0, rows // 2), (rows // 2, rows)] if kind == "gate_up" else [(0, rows)]
    return [start for low, high in halves for start in range(low, high, step)] + [rows]


def _ignored(files: Files, source: Path, arch: Architecture, tensors: Mapping[str, LazyTensor]) -> tuple[str, ...]:
    """Names of superfluous tensors. Raises :class:`UserError` for one that means something ``config.json`` denies."""
    extra = sorted(set(tensors) - set(hf_shapes(arch)))
    for name in extra:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name != _OUTPUT or not arch.tied_embeddings:
            raise UserError(f"{source}: config.json has no place for the tensor {name}")
        streams = [Stream(((key, tensors[key]),)) for key in (_EMBEDDING, _OUTPUT)]
        hashes = transfer(files, streams)
        if hashes[_EMBEDDING] != hashes[_OUTPUT]:
            raise UserError(f"{source}: config.json ties the embeddings, but {_OUTPUT} differs from {_EMBEDDING}")
    return tuple(extra)


def _record_files(source: Path, side: Path, arch: Architecture) -> None:
    """Keep the index as it is, and write one for a single file too: export makes the same files again."""
    if (source / INDEX).is_file():
        shutil.copyfile(source / INDEX, side / INDEX)
    else:
        (side / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(hf_shapes(arch), SINGLE_FILE)}))


# ------------------------------------------------------------------------------------------- Megatron -> Hugging Face


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
    """Write the model of the Megatron checkpoint ``source`` as the Hugging Face directory ``target``.

    ``hf_config``: the directory with config and tokenizer, unless import left them in the checkpoint. The weights are
    split into files as they were before import, or into files of at most ``max_shard_bytes``.
    """
    clock, memory = time.perf_counter(), PeakMemory()
    with memory, open_files() as files:
        source = find_checkpoint(source)
        side = hf_config or source / HF_SUBDIRECTORY
        require_apart(target, source, side)
        if not (side / "config.json").is_file():
            raise UserError(
                f"{side / 'config.json'} is missing; name the model's Hugging Face directory with --hf-config"
            )
        arch, shapes = read_architecture(side), hf_shapes(read_architecture(side))
        tensors = megatron_to_hf(arch, source, read_checkpoint(source))
        specs = {name: (shapes[name], parts[0].dtype) for name, parts in tensors.items()}
        dtype = _float_dtype(source, specs)
        files_of = None if max_shard_bytes or hf_config else _recorded_files(side, shapes)
        shards = plan_shards(specs, files_of or assign_files(specs, max_shard_bytes or SHARD_BYTES))
        require_space(target, sum(shard.nbytes for shard in shards))
        with new_directory(target, overwrite) as temporary:
            streams = []
            for shard in shards:
                path = temporary / shard.file
                with path.open("wb") as file:
                    file.write(shard.header)
                    file.truncate(shard.nbytes)
                for name, offset in shard.offsets.items():
                    parts = tuple((name, part) for part in tensors[name])
                    output = Output(path, offset, sum(part.nbytes for _, part in parts))
                    streams.append(Stream(parts, (output,)))
            hashes = transfer(files, streams, _counter(progress, sum(stream.nbytes for stream in streams)))
            if files_of and len(shards) > 1:
                shutil.copyfile(side / INDEX, temporary / INDEX)
            else:
                write_index(temporary, shards)
            copy_side_files(side, temporary, dtype)
            seconds, checked = time.perf_counter() - clock, None
            if verify:
                written = {name: [tensor] for name, tensor in read_tensors(temporary).items()}
                checked = _verify(hashes, written, progress)
            result = Conversion(
                direction="export",
                source=str(source),
                target=str(target),
                architecture=arch.name,
                dtype=dtype,
                bytes_moved=sum(stream.nbytes for stream in streams),
                seconds=seconds,
                verify_seconds=checked,
                padding={"vocab_size": arch.vocab_size},
                ignored=(),
                tensors=dict(sorted(hashes.items())),
                peak_resident_bytes=memory.resident_bytes,
                peak_anonymous_bytes=memory.anonymous_bytes,
            )
            _write_record(temporary, result)
    return result


def megatron_to_hf(arch: Architecture, path: Path, stored: Mapping[str, StoredTensors]) -> dict[str, list[LazyTensor]]:
    """Every Hugging Face tensor as slices of the checkpoint's tensors, in order.

    Raises :class:`UserError` when the checkpoint lacks a tensor, has one too many, or of another shape.
    """
    prefix, model = model_tensors(stored, path)
    used: set[str] = set()
    pieces: dict[str, list[tuple[int, LazyTensor]]] = {name: [] for name in hf_shapes(arch)}
    kinds = _interleavings(arch)
    for megatron, copies in _copies(arch).items():
        tensor = _find(model, prefix, megatron, arch, path, used)
        shape = _megatron_shape(arch, copies)
        padded = kinds[megatron] == "vocab" and tensor.shape[0] > shape[0]
        if tensor.shape != ((tensor.shape[0], *shape[1:]) if padded else shape):
            raise UserError(f"{path}: {megatron} has shape {list(tensor.shape)}, config.json implies {list(shape)}")
        for copy in copies:
            piece = _slice(tensor, copy.start, copy.start + copy.length, copy.dim)
            pieces[copy.hf].append((copy.hf_start, piece))
    for key in sorted(set(model) - used):
        raise UserError(f"{path}: config.json has no place for the checkpoint's tensor {key}")
    return {name: [part for _, part in sorted(parts, key=lambda item: item[0])] for name, parts in pieces.items()}


def _find(
    model: Mapping[str, StoredTensors], prefix: str, megatron: str, arch: Architecture, path: Path, used: set[str]
) -> LazyTensor:
    """The tensor under any of the names Megatron gives it: layers stacked or apart, norms fused or not."""
    key, layer = _checkpoint_key(megatron)
    for name in (key, _local_name(key)):
        if layer is None:
            if prefix + name in model:
                used.add(prefix + name)
                return model[prefix + name].whole()
            continue
        if prefix + name in model:
            stacked = model[prefix + name]
            if stacked.shape[0] != arch.num_layers:
                raise UserError(
                    f"{path}: the checkpoint has {stacked.shape[0]} layers, config.json says {arch.num_layers}"
                )
            used.add(prefix + name)
            return stacked.layer(layer)
        apart = f"{prefix}{_LAYER}{layer}.{name.removeprefix(_LAYER)}"
        for names in ([apart], [apart + "_w", apart + "_v"]):  # gate and up apart: Megatron's singleton_local_shards
            if set(names) <= set(model):
                used.update(names)
                return concatenate(model[n].whole() for n in names)
    raise UserError(f"{path}: tensor {prefix}{key} is missing; config.json promises it")


def _local_name(key: str) -> str:
    for fused, local in LOCAL_NAMES.items():
        if key.endswith(fused):
            return key.removesuffix(fused) + local
    return key


def _megatron_shape(arch: Architecture, copies: Sequence[Copy]) -> tuple[int, ...]:
    shape = hf_shapes(arch)[copies[0].hf]
    return shape if copies[0].dim else (sum(copy.length for copy in copies), *shape[1:])


def _recorded_files(side: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str] | None:
    """Tensor name -> file as import found it, if it knew exactly these tensors."""
    if not (side / INDEX).is_file():
        return None
    files = read_weight_map(side)
    return files if set(files) == set(shapes) else None


# ------------------------------------------------------------------------------------------------------ both directions


def _copies(arch: Architecture) -> dict[str, list[Copy]]:
    """Megatron parameter (global layer numbers, Transformer Engine's names) -> its copies in order of its rows."""
    copies: dict[str, list[Copy]] = {}
    for copy in plan(arch, Layout(make_vocab_size_divisible_by=1, transformer_engine=True), Coordinates()):
        copies.setdefault(copy.megatron, []).append(copy)
    return {name: sorted(group, key=lambda copy: copy.start) for name, group in copies.items()}


def _interleavings(arch: Architecture) -> dict[str, Interleaving]:
    return interleavings(arch, Layout(make_vocab_size_divisible_by=1, transformer_engine=True), Coordinates())


def _checkpoint_key(megatron: str) -> tuple[str, int | None]:
    """``decoder.layers.7.mlp...`` -> (``decoder.layers.mlp...``, 7): layers are stacked in a checkpoint."""
    if not megatron.startswith(_LAYER):
        return megatron, None
    number, _, rest = megatron.removeprefix(_LAYER).partition(".")
    return _LAYER + rest, int(number)


def _slice(tensor: LazyTensor, start: int, stop: int, dim: int) -> LazyTensor:
    if dim == 0:
        return tensor.narrow(start, stop)
    assert (start, stop) == (0, tensor.shape[dim]), "one rank holds all columns"
    return tensor


def _one_dtype(where: Path, tensors: Mapping[str, LazyTensor]) -> str:
    """The common element type. Raises :class:`UserError` naming the first tensor that differs."""
    expected = _float_dtype(where, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.dtype != expected:
            raise UserError(f"{where}: {name} has dtype {tensor.dtype}, but {_EMBEDDING} has {expected}")
    return expected


def _float_dtype(where: Path, specs: Specs) -> str:
    """The element type of the embedding. Megatron's local RMSNorm is fp32 in a bf16 model that was never wrapped, so in
    a checkpoint other tensors may differ from it; they keep their bits."""
    for name, (_, dtype) in specs.items():
        if dtype not in _FLOATS:
            raise UserError(f"{where}: {name} has dtype {dtype}; known: {', '.join(_FLOATS)}")
    return specs[_EMBEDDING][1]


def _verify(hashes: Mapping[str, str], written: Mapping[str, Sequence[LazyTensor]], progress: Progress) -> float:
    """Read the result again and compare every tensor with what was read from the source; returns the seconds."""
    clock = time.perf_counter()
    streams = [Stream(tuple((name, part) for part in parts)) for name, parts in written.items()]
    with open_files() as files:
        found = transfer(files, streams, _counter(progress, sum(stream.nbytes for stream in streams)))
    for name in sorted(set(hashes) | set(found)):
        if hashes.get(name) != found.get(name):
            raise UserError(f"verification failed: {name} reads back differently; is the disk in order?")
    return time.perf_counter() - clock


def _counter(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return add


def _write_record(directory: Path, result: Conversion) -> None:
    (directory / "conversion.json").write_text(json.dumps(result.__dict__, indent=1) + "\n")


__all__ = ["Conversion", "export_checkpoint", "import_checkpoint", "megatron_to_hf"]
