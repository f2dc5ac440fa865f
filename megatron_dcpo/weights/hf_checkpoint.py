"""Hugging Face checkpoint directories: memory-mapped slices in, sharded safetensors out."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.architectures.keys import QUANTIZED_KEYS
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import (
    FLOATS,
    FROM_SAFETENSORS,
    SAFETENSORS_CODES,
    dtype_bytes,
    name_of,
    torch_dtype,
)
from megatron_dcpo.runtime.files import new_directory, temporary_name
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.weights.planner import Copy
from megatron_dcpo.weights.table import (
    EMBEDDING,
    OUTPUT,
    StoredPart,
    fused_parts,
    hf_shapes,
    is_constant,
    parts_of,
    stored_names,
    stored_shapes,
)

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".msgpack", ".h5")
# what transformers computes itself and ignores in files
_BUFFERS = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")
# where a converted checkpoint keeps the layers that are carried along, next to config.json
KEPT_LAYERS = "nextn_layers.safetensors"
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_NOT_SIDE_FILES = (INDEX, "pytorch_model.bin.index.json", "conversion.json")
_SIDE_DIRECTORIES = ("additional_chat_templates",)


class Sliceable(Protocol):
    """A tensor of a file that is read as far as it is indexed."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class HFReader:
    """The tensors of a Hugging Face directory, memory-mapped, so that only used parts are read. A
    tensor that holds all experts of a layer appears as one tensor for each expert, and with
    ``arch`` a fused one as the weight table's.

    ``specs`` has shape and type of every tensor. Raises :class:`UserError` for missing, truncated
    or malformed files, and if the index and the files disagree.
    """

    def __init__(self, model_dir: str | Path, arch: Architecture | None = None) -> None:
        self.model_dir = Path(model_dir)
        self.arch = arch
        self.specs: dict[str, tuple[tuple[int, ...], str]] = {}
        self.files: dict[str, Path] = {}
        self._readers: dict[str, Callable[[], Sliceable]] = {}
        self._names: set[str] = set()
        weight_map = read_weight_map(self.model_dir)
        for file in sorted(set(weight_map.values()) or {SINGLE_FILE}):
            self._add(self.model_dir / file)
        for name, file in weight_map.items():
            if name not in self._names:
                raise UserError(
                    f"{self.model_dir / file}: tensor {name} is missing; {INDEX} promises it"
                )

    def _add(self, path: Path) -> None:
        if path.parent != self.model_dir or not path.is_file():
            raise UserError(f"{path} is missing; {INDEX} names it")
        try:
            file = safe_open(str(path), framework="pt")
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self._names.add(name)
                header = file.get_slice(name)
                shape = tuple(header.get_shape())
                dtype = FROM_SAFETENSORS[header.get_dtype()]
                read = partial(file.get_slice, name)
                self._check_fused(path, name, shape)
                parts = parts_of(name, shape, self.arch)
                if not parts:
                    self._add_tensor(path, name, (shape, dtype), read)
                for part in parts:
                    read_part = partial(_PartOfTensor, read, part)
                    spec = (part.shape(shape), dtype)
                    self._add_tensor(path, part.name, spec, read_part)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise UserError(f"{path} is truncated or not a safetensors file ({error})") from None
        except KeyError as error:
            raise UserError(f"{path}: tensor {name} has the unknown element type {error}") from None

    def _check_fused(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        """Raise :class:`UserError` if a fused tensor has not the rows and columns of its parts."""
        if self.arch is None or name not in fused_parts(self.arch):
            return
        expected = stored_shapes(self.arch)[name]
        if shape != expected:
            raise UserError(
                f"{path}: {name} has shape {list(shape)}, config.json implies {list(expected)}"
            )

    def _add_tensor(
        self,
        path: Path,
        name: str,
        spec: tuple[tuple[int, ...], str],
        read: Callable[[], Sliceable],
    ) -> None:
        if name in self.specs:
            raise UserError(f"{path}: tensor {name} is in another file of the checkpoint as well")
        self.specs[name] = spec
        self.files[name] = path
        self._readers[name] = read

    def slice(self, name: str) -> Sliceable:
        """Return the tensor ``name``; index it to get a view of the mapped file. Raises
        :class:`UserError` if it is missing.
        """
        if name not in self._readers:
            raise UserError(f"{self.model_dir}: tensor {name} is missing; config.json promises it")
        return self._readers[name]()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor ``name``, a view of the mapped file."""
        tensor: torch.Tensor = self.slice(name)[:]
        return tensor

    def check(self, arch: Architecture) -> tuple[str, ...]:
        """Return the names of the tensors that are not needed: buffers, and the output layer if it
        equals the embedding to which ``config.json`` ties it.

        Raises :class:`UserError` if a tensor is missing, quantized or without a place in the
        model, or if its shape contradicts ``config.json``.
        """
        shapes = hf_shapes(arch)
        for name, (_, dtype) in self.specs.items():
            if dtype not in FLOATS and not name.endswith(_BUFFERS):
                raise UserError(
                    f"{self.model_dir}: tensor {name} has the element type {dtype}; quantized "
                    f"weights are not supported (known: {', '.join(FLOATS)}), take the model's "
                    "bf16 or fp32 weights"
                )
        for name in (*fused_parts(arch), *shapes):
            if name not in self.specs and name not in self._names:
                raise UserError(
                    f"{self.model_dir}: tensor {name} is missing; config.json promises it"
                )
        extra = sorted(set(self.specs) - set(shapes))
        extra = [name for name in extra if not is_carried(name, arch)]
        for name in extra:
            self._check_extra(name, arch)
        for name, expected in shapes.items():
            shape, _ = self.specs[name]
            if shape != expected:
                raise UserError(
                    f"{self.model_dir}: {name} has shape {list(shape)}, config.json implies "
                    f"{list(expected)}"
                )
        return tuple(extra)

    def _check_extra(self, name: str, arch: Architecture) -> None:
        """Raise :class:`UserError` if a tensor that the architecture lacks is more than a copy or
        a buffer.
        """
        if name.endswith(_BUFFERS):
            return
        if name != OUTPUT or not arch.tied_embeddings:
            raise UserError(f"{self.model_dir}: config.json has no place for the tensor {name}")
        if self.specs[OUTPUT] == self.specs[EMBEDDING]:
            head = _as_bytes(self.tensor(OUTPUT))
            if torch.equal(head, _as_bytes(self.tensor(EMBEDDING))):
                return
        raise UserError(
            f"{self.model_dir}: config.json ties the embeddings, but {OUTPUT} differs from "
            f"{EMBEDDING}; set tie_word_embeddings to false, or remove {OUTPUT}"
        )


def is_carried(name: str, arch: Architecture) -> bool:
    """Return whether a tensor is of a layer behind the model's own that predicts further tokens."""
    match = _OF_LAYER.match(name)
    if match is None:
        return False
    return 0 <= int(match[1]) - arch.num_layers < arch.nextn_layers


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, which are equal for equal NaNs too."""
    return tensor.contiguous().view(torch.uint8)


class _PartOfTensor:
    """A part of a tensor that holds several of the table's. It is indexed like a separate
    tensor.
    """

    def __init__(self, read: Callable[[], Sliceable], part: StoredPart) -> None:
        self.whole: Any = read()
        self.place = part

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        if not isinstance(index, tuple):
            index = (index,)
        rows, *columns = index
        start, stop, _ = rows.indices(self.place.rows)
        part_rows = slice(self.place.first + start, self.place.first + stop)
        part: torch.Tensor
        if self.place.expert is None:
            part = self.whole[part_rows, *columns]
        else:
            part = self.whole[self.place.expert, part_rows, *columns]
        return part


class Carried:
    """The tensors of the layers behind a model's own that predict further tokens
    (``num_nextn_predict_layers``). ``specs`` has shape and type of each, nothing if there are none.

    An engine may speculate with them. Nothing here computes with them or trains them, as
    transformers does not load them; an export has them as the checkpoint had them.
    """

    def __init__(self, specs: Specs, read: Callable[[str], torch.Tensor]) -> None:
        self.specs = specs
        self.tensor = read

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.specs.values()))

    @classmethod
    def of(cls, reader: HFReader, arch: Architecture) -> Carried:
        """Return the carried tensors of a Hugging Face directory."""
        specs = {name: spec for name, spec in reader.specs.items() if is_carried(name, arch)}
        return cls(specs, reader.tensor)

    @classmethod
    def next_to_config(cls, directory: Path, arch: Architecture) -> Carried:
        """Return the carried tensors of the model whose ``config.json`` is in ``directory``, from
        its weights, or from what the import of a checkpoint kept. Raises :class:`UserError` if
        neither is there.
        """
        if not arch.nextn_layers:
            return cls({}, _nothing)
        if (directory / KEPT_LAYERS).is_file():
            return _kept(directory / KEPT_LAYERS)
        if not any((directory / name).is_file() for name in (SINGLE_FILE, INDEX)):
            raise UserError(
                f"{directory / 'config.json'}: num_nextn_predict_layers={arch.nextn_layers}, but "
                "the directory has no weights to take these layers from; name the model's own "
                "directory, or set it to 0 for a model without them"
            )
        weight_map = read_weight_map(directory)
        if weight_map and not any(is_carried(name, arch) for name in weight_map):
            return cls({}, _nothing)
        carried = cls.of(HFReader(directory, arch), arch)
        for name, (_, dtype) in carried.specs.items():
            if dtype not in FLOATS:
                raise UserError(
                    f"{directory}: tensor {name} has the element type {dtype}; take the "
                    "directory of the model's bf16 or fp32 weights"
                )
        return carried

    def keep(self, directory: Path) -> None:
        """Write them into ``directory``, where :meth:`next_to_config` finds them; no file if there
        are none.
        """
        if self.specs:
            (shard,) = plan_shards(self.specs, dict.fromkeys(self.specs, KEPT_LAYERS))
            write_tensors(directory / KEPT_LAYERS, shard, self.tensor)


def _kept(path: Path) -> Carried:
    try:
        file = safe_open(str(path), framework="pt")
        specs = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            header = file.get_slice(name)
            dtype = FROM_SAFETENSORS[header.get_dtype()]
            specs[name] = (tuple(header.get_shape()), dtype)
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error})") from None
    return Carried(specs, file.get_tensor)


def _nothing(name: str) -> torch.Tensor:
    raise KeyError(name)


def read_weight_map(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; nothing for a checkpoint of one file."""
    index = model_dir / INDEX
    if not index.is_file():
        if not (model_dir / SINGLE_FILE).is_file():
            raise UserError(
                f"{model_dir} holds neither {SINGLE_FILE} nor {INDEX}; no weights to read"
            )
        _check_single(model_dir)
        return {}
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} is not a valid index: it has no weight_map")
    if (model_dir / SINGLE_FILE).is_file() and SINGLE_FILE not in weight_map.values():
        raise UserError(
            f"{model_dir} holds two sets of weights, {SINGLE_FILE} and the files of {INDEX}: "
            "transformers reads the first, vLLM the second; remove the one that is not meant"
        )
    return {name: str(file) for name, file in weight_map.items()}


def _check_single(model_dir: Path) -> None:
    """Raise :class:`UserError` if another file without an index holds the same tensors: vLLM reads
    every safetensors file of the directory, transformers and this package one.
    """
    others = [path for path in model_dir.glob("*.safetensors") if path.name != SINGLE_FILE]
    if not others:
        return
    names = _names_in(model_dir / SINGLE_FILE)
    for other in sorted(others):
        if names & _names_in(other):
            raise UserError(
                f"{model_dir} holds two sets of weights, {SINGLE_FILE} and {other.name}, and no "
                f"{INDEX}: vLLM reads both, transformers {SINGLE_FILE}; remove the one that is not "
                "meant"
            )


def _names_in(path: Path) -> set[str]:
    """Return the names of the tensors in a file, none for one that cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError):
        return set()  # what is wrong with it is said where it is read


@torch.no_grad()
def load_into(
    reader: HFReader, copies: Iterable[Copy], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Execute ``copies`` from the checkpoint into ``parameters``; padding rows become zero. Raises
    :class:`UserError` if a weight is NaN or infinite.
    """
    for name in {copy.megatron for copy in copies if copy.megatron in parameters}:
        parameters[name].zero_()
    for copy in copies:
        source = reader.slice(copy.hf)
        if copy.dim == 0:
            values = source[copy.hf_start : copy.hf_stop]
        else:
            values = source[:, copy.hf_start : copy.hf_stop]
        target = parameters[copy.megatron].narrow(copy.dim, copy.start, copy.length)
        target.copy_(values)
        if not target.is_meta and not torch.isfinite(target).all():
            kind = "NaN" if target.isnan().any() else "infinity"
            raise UserError(
                f"{reader.files[copy.hf]}: tensor {copy.hf} has {kind} in it, as "
                f"{name_of(target.dtype)}; take an "
                "intact checkpoint, or another params_dtype"
            )


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write: ``header``, then every tensor at its offset from the start of
    the file.
    """

    file: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


# Shape and type (torch's name) of the tensors to write, in the order of the model.
Specs = Mapping[str, tuple[tuple[int, ...], str]]


def assign_files(specs: Specs, max_bytes: int = SHARD_BYTES) -> dict[str, str]:
    """Return the file of each tensor: in order, files of at most ``max_bytes``, but with at least
    one tensor.
    """
    parts: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if parts[-1] and size + _nbytes(spec) > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += _nbytes(spec)
    if len(parts) == 1:
        return dict.fromkeys(parts[0], SINGLE_FILE)
    files = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        files.update(dict.fromkeys(part, file))
    return files


def plan_shards(specs: Specs, files: Mapping[str, str]) -> list[Shard]:
    """Return headers and offsets, in the order and the form in which the safetensors library writes
    them: larger types first, then by name.
    """
    shards = []
    for file in dict.fromkeys(files[name] for name in specs):
        names = [name for name in specs if files[name] == file]
        names.sort(key=lambda name: (-dtype_bytes(specs[name][1]), name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts = {}
        end = 0
        for name in names:
            start = end
            end = end + _nbytes(specs[name])
            shape, dtype = specs[name]
            header[name] = {
                "dtype": SAFETENSORS_CODES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            starts[name] = start
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        data = 8 + len(text)
        shards.append(
            Shard(
                file=file,
                header=len(text).to_bytes(8, "little") + text,
                offsets={name: data + start for name, start in starts.items()},
                nbytes=data + end,
            )
        )
    return shards


def _nbytes(spec: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = spec
    return dtype_bytes(dtype) * math.prod(shape)


def _alone(failure: str) -> list[str]:
    return [failure]


@dataclass(frozen=True)
class Writers:
    """The ranks that write a checkpoint together, as one of them sees it: its replica collects and
    writes every ``replicas``-th file, from the one with the number ``replica`` on. ``writes`` says
    whether this rank writes what its replica collects, ``leads`` whether it opens and closes the
    directory. ``gather`` returns the text of every rank; collective over all of them.
    """

    replica: int = 0
    replicas: int = 1
    writes: bool = True
    leads: bool = True
    gather: Callable[[str], Sequence[str]] = _alone

    @contextmanager
    def directory(self, out: Path) -> Iterator[Path]:
        """Yield ``out`` under a temporary name, as :func:`new_directory` on the rank that leads."""
        with ExitStack() as opened:
            failure = ""
            if self.leads:
                try:
                    opened.enter_context(new_directory(out, overwrite=True))
                except UserError as error:
                    failure = str(error)
            self.check(failure)
            yield temporary_name(out)

    def check(self, *failures: str) -> None:
        """Raise :class:`UserError` on all ranks if one of them has a failure, "" for none."""
        gathered = self.gather(next(filter(None, failures), ""))
        for failure in filter(None, gathered):
            raise UserError(failure)


def write_checkpoint(
    out: Path,
    source_dir: Path,
    arch: Architecture,
    dtype: torch.dtype,
    collect: Callable[[dict[str, tuple[int, ...]]], dict[str, torch.Tensor]],
    writers: Writers = Writers(),
    max_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory shard by shard; ``collect`` returns the table's tensors of one
    shard, and is collective over a replica of the ``writers``.

    The directory has a temporary name until it is complete. Everything but the weights (config,
    tokenizer, templates) is taken from ``source_dir``, and so are the tensors of :class:`Carried`.
    Raises :class:`UserError` on all ranks if one of them cannot write; nothing is left then.
    """
    name = name_of(dtype)
    specs: dict[str, tuple[tuple[int, ...], str]] = {}
    for key, shape in stored_shapes(arch).items():
        specs[key] = (shape, "float32" if is_constant(key) else name)
    carried = Carried.next_to_config(source_dir, arch)
    specs |= carried.specs
    shards = plan_shards(specs, assign_files(specs, max_bytes))

    def collected(shard: Shard) -> Callable[[str], torch.Tensor]:
        """Return what returns a tensor of a shard."""
        shapes = {}
        for key, shape in hf_shapes(arch).items():
            if stored_names(arch)[key] in shard.offsets:
                shapes[key] = shape
        tensors = joined(arch, collect(shapes))

        def read(key: str) -> torch.Tensor:
            if key in carried.specs:
                return carried.tensor(key)
            return tensors[key].to(torch_dtype(specs[key][1]))

        return read

    with writers.directory(out) as temporary:
        failures = []
        # whoever cannot write goes on to collect: the others of its replica wait for it
        for shard in shards[writers.replica :: writers.replicas]:
            read = collected(shard)
            if writers.writes:
                write = partial(write_tensors, temporary / shard.file, shard, read)
                failures.append(_failure(out, write))
        if writers.leads:
            failures.append(_failure(out, partial(write_index, temporary, shards)))
            copy = partial(copy_side_files, source_dir, temporary, name)
            failures.append(_failure(out, copy))
        writers.check(*failures)


def _failure(out: Path, write: Callable[[], None]) -> str:
    """Write a part of a directory; return why that failed, "" if it did not."""
    try:
        write()
    except UserError as error:
        return str(error)
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            why = f"{why}; all ranks need the same directory, on a disk that their nodes share"
        return f"cannot write {out}: {why}; nothing was left behind"
    return ""


def write_tensors(path: Path, shard: Shard, read: Callable[[str], torch.Tensor]) -> None:
    """Write the file of a shard; ``read`` returns one tensor at a time."""
    with path.open("wb") as file:
        file.write(shard.header)
        for key in shard.offsets:
            file.write(_as_bytes(read(key)).reshape(-1).numpy().data)


def joined(arch: Architecture, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the table as a checkpoint holds them: those that belong into a fused one as
    one.
    """
    stored = dict(tensors)
    for whole, parts in fused_parts(arch).items():
        if parts[0].name in stored:
            stored[whole] = torch.cat([stored.pop(part.name) for part in parts])
    return stored


def in_parts(
    arch: Architecture | None, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint or of a model of transformers as the table has them; the
    parts of one that holds several are views.
    """
    tensors = {}
    for name, tensor in stored.items():
        parts = parts_of(name, tensor.shape, arch)
        if not parts:
            tensors[name] = tensor
        for part in parts:
            tensors[part.name] = part.of(tensor)
    return tensors


@contextmanager
def tensors_on_disk(
    out: Path, specs: Specs, max_bytes: int = SHARD_BYTES
) -> Iterator[dict[str, torch.Tensor]]:
    """Create the files of a checkpoint in ``out`` and yield every tensor, mapped to its part of
    them, to be filled slice by slice.

    Raises :class:`OSError` if the disk has no room for them. They are on the disk when the block
    ends.
    """
    shards = plan_shards(specs, assign_files(specs, max_bytes))
    tensors = {}
    maps = []
    for shard in shards:
        with (out / shard.file).open("w+b") as file:
            file.write(shard.header)
            file.flush()
            # Writing to a map of a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, shard.nbytes)
            mapped = mmap.mmap(file.fileno(), shard.nbytes)
        maps.append(mapped)
        for name, offset in shard.offsets.items():
            shape, dtype = specs[name]
            flat = torch.frombuffer(
                mapped, dtype=torch_dtype(dtype), offset=offset, count=math.prod(shape)
            )
            tensors[name] = flat.view(shape)
    yield tensors
    for mapped in maps:
        mapped.flush()
    write_index(out, shards)


def write_index(out: Path, shards: list[Shard]) -> None:
    """Write the index of a checkpoint with several files; a single file needs none."""
    if len(shards) < 2:
        return
    total = sum(shard.nbytes - len(shard.header) for shard in shards)
    weight_map = {}
    for shard in shards:
        weight_map.update(dict.fromkeys(shard.offsets, shard.file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def check_side_files(model_dir: Path) -> None:
    """Raise :class:`UserError` if a file that goes with every export of the model is a link to
    something outside the directory, which may be anybody's. Blobs in the hub's cache are allowed.
    """
    _side_files(model_dir)


def copy_side_files(source_dir: Path, out: Path, dtype: str | None = None) -> None:
    """Copy the files of the model other than its weights (config, tokenizer, templates, remote
    code, license). With ``dtype``, ``config.json`` describes weights of that type: it names the
    type, and no quantization.
    """
    for path in _side_files(source_dir):
        target = out / path.relative_to(source_dir)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    if dtype is None:
        return
    config = read_json_object(out / "config.json")
    described = {key: value for key, value in config.items() if key not in QUANTIZED_KEYS}
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    described.update(dict.fromkeys(keys or ["torch_dtype"], dtype))
    if described != config:
        (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _side_files(model_dir: Path) -> list[Path]:
    """Return the files of the model other than its weights. Raises :class:`UserError` for a link
    that leads out of the directory.
    """
    files = []
    for path in sorted(model_dir.iterdir()):
        if path.name in _SIDE_DIRECTORIES and path.is_dir():
            files += sorted(part for part in path.rglob("*") if part.is_file())
        elif _is_side_file(path.name) and path.is_file():
            files.append(path)
    inside = model_dir.resolve()
    for path in files:
        real = path.resolve()
        if not (real.is_relative_to(inside) or _is_in_hub_cache(real)):
            raise UserError(
                f"{path} is a link out of the model directory, to {real}; a copy of it would go "
                "into every export. Replace the link by the file, or remove it"
            )
    return files


def _is_in_hub_cache(path: Path) -> bool:
    """Return whether a file is a blob of a model in a cache of huggingface_hub, to which snapshots
    and older downloads link.
    """
    blobs = path.parent
    return blobs.name == "blobs" and blobs.parent.name.startswith("models--")


def _is_side_file(name: str) -> bool:
    if name.startswith(".") or name.endswith(_WEIGHTS):
        return False
    return name not in _NOT_SIDE_FILES
