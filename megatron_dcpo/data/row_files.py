"""Rows of data files: JSON, JSON lines, CSV (also gzip-compressed), parquet, Arrow, folders that
``save_to_disk`` of the datasets library has written, and hub data sets. Several files are one data
set when a pattern (``train-*.parquet``) or their names (``-00000-of-00003``) say so. What cannot be
read is a ``UserError`` that names the line.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.nearby_paths import places
from megatron_dcpo.runtime.text import parse_json, read_json_object

Row = Mapping[str, Any]

ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
SUFFIXES = (*ROW_SUFFIXES, ".jsonl.gz", ".json.gz", ".csv.gz")
_LINES = (".jsonl", ".jsonl.gz")
LONGEST = 1 << 30  # characters of a line, or of a JSON array: compressed, they may be a small file
# what save_to_disk writes next to the Arrow files of a split, and above its splits
_STATE, _SPLITS = "state.json", "dataset_dict.json"
# a part of a data set; older releases of the datasets library put a fingerprint behind the numbers
_SHARD = re.compile(
    r"(?P<split>.+?)[-_.](?P<number>\d+)[-_]of[-_](?P<total>\d+)"
    r"(?P<fingerprint>[-_.][0-9a-zA-Z_-]{1,80})?(?P<suffix>(?:\.[a-z]+)+)"
)
_OTHER_SEPARATOR = re.compile("[;\t|]")  # of a CSV file's columns
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?\Z")


def read_rows(path_or_name: str | Path) -> Iterator[Row]:
    """Yield the rows of a file, of the files that a pattern matches, of the data in a directory, or
    of a hub data set. Raises :class:`UserError` for what cannot be read, and for a file that has
    changed at the end.
    """
    files = _data_files(path_or_name)
    if not files:
        yield from _read_hub(str(path_or_name))
        return
    before = [_state(path) for path in files]
    for path in files:
        yield from _read_file(path)
    for path, state in zip(files, before, strict=True):
        if _state(path) != state:
            raise UserError(
                f"{path} was changed while it was read; run the same command again when it is "
                "complete"
            )


def is_here(path_or_name: str) -> bool:
    """Return whether a file, a directory, or a file that a pattern matches is on this machine."""
    path = Path(path_or_name).expanduser()
    return path.exists() or bool(_matches(path))


def _data_files(path_or_name: str | Path) -> list[Path]:
    """Return the files of a data set in order, none for a name on the hub. Raises
    :class:`UserError` if there are none, or if they are not one data set.
    """
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return _files_of_directory(path)
    if path.exists():
        return [path]
    matches = _matches(path)
    if matches:
        _check_complete(matches, str(path_or_name))
        return matches
    if isinstance(path_or_name, str) and is_hub_name(path_or_name):
        return []
    raise UserError(f"{path_or_name}: no such data file{places(path_or_name)}")


def _matches(pattern: Path) -> list[Path]:
    """Return the files that a pattern with ``*``, ``?`` or ``[...]`` matches, by name."""
    if not glob.has_magic(str(pattern)):
        return []
    found = (Path(name) for name in glob.glob(str(pattern), recursive=True))
    return sorted(path for path in found if path.is_file())


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_file(path: Path) -> Iterator[Row]:
    if _is_lfs_pointer(path):
        raise UserError(f"{path} is a pointer of Git LFS; git lfs pull brings the file")
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _read_parquet(path)
    elif name.endswith(".arrow"):
        yield from _read_arrow(path)
    elif name.endswith((".jsonl", ".json")):
        yield from _read_json(path)
    elif name.endswith(".csv"):
        yield from _read_csv(path)
    else:
        raise UserError(f"{path}: unknown kind of data file; expected one of {', '.join(SUFFIXES)}")


def _is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what Git LFS leaves in the place of one. What cannot be read is not,
    nor is a pipe, whose content can be read only once.
    """
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def read_json_lines(
    path: str | Path, allow_truncated: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (FILE:LINE, object) of every line that is not blank, as it is read; NaN and Infinity
    are numbers.

    ``path`` may be gzip-compressed, or ``-`` for standard input. ``allow_truncated``: a broken last
    line without its newline, as a killed process leaves it, is left out. Raises :class:`UserError`,
    naming the line.
    """
    with _open_text(path) as file:
        for number, line in enumerate(
            iter(lambda: file.readline(LONGEST), ""), start=1
        ):  # a test set may be gigabytes
            if len(line) == LONGEST:
                raise UserError(
                    f"{path}:{number}: a line of more than {LONGEST >> 20} M characters; split "
                    "the file"
                )
            if line.strip():
                try:
                    yield f"{path}:{number}", _parse_object(line, f"{path}:{number}")
                except UserError:
                    if allow_truncated and not line.endswith("\n"):
                        return
                    raise


@contextmanager
def _open_text(path: str | Path) -> Iterator[TextIO]:
    """Open a file whose lines end at newlines only: an answer may hold other separators."""
    try:
        with ExitStack() as stack:
            if str(path) == "-":
                stream: Any = sys.stdin.buffer
            else:
                stream = stack.enter_context(open(path, "rb"))
                if stream.peek(2)[:2] == b"\x1f\x8b":
                    stream = stack.enter_context(gzip.open(stream))
            yield TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); convert the file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _read_json(path: Path) -> Iterator[Row]:
    """Yield a JSON array of objects, or one object per line (also under a plain .json name). One
    object that has such an array as ``Data`` (TriviaQA) or ``data`` holds the rows in it; any other
    one is a row.
    """
    with _open_text(path) as file:
        lines = (line for line in iter(lambda: file.readline(LONGEST), "") if line.strip())
        head = next(lines, "")
        is_one = head.lstrip().startswith("{") and next(lines, None) is None
        if head.startswith("version https://git-lfs"):
            raise UserError(f"{path}: only a git-lfs pointer; fetch the file with `git lfs pull`")
    begins_object = head.strip() == "{" or (is_one and '"data"' in head.lower())
    begins_object = begins_object and not path.name.endswith(_LINES)
    if not head.lstrip().startswith("[") and not begins_object:
        for where, row in read_json_lines(path):
            yield from (
                _objects(where, row["Data"]) if isinstance(row.get("Data"), list) else (row,)
            )
        return
    with _open_text(path) as file:
        text = file.read(LONGEST)
        if len(text) == LONGEST:
            raise UserError(
                f"{path}: more than {LONGEST >> 20} M characters; write one object per line"
            )
        yield from _parse_array(path, text)


def _parse_array(path: Path, text: str) -> list[Row]:
    try:
        rows = parse_json(text)
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(
            f"{path}{line}: not valid JSON ({getattr(error, 'msg', error)}); fix the file"
        ) from None
    if isinstance(rows, dict):
        rows = next((rows[name] for name in ("Data", "data") if _are_rows(rows.get(name))), [rows])
    if not isinstance(rows, list):
        raise UserError(
            f"{path}: neither a list of objects nor an object; write one object per line"
        )
    return _objects(str(path), rows)


def _are_rows(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _objects(where: str, rows: list[Any]) -> list[Row]:
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(
                f"{where}: element {index + 1} must be an object, got {type(row).__name__}"
            )
    return rows


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(
            f"{where}: not valid JSON ({getattr(error, 'msg', error)}); fix or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: not a JSON object but {type(row).__name__}; fix or remove the line"
        )
    return row


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a table whose first line names the columns; all values are texts."""
    csv.field_size_limit(LONGEST)  # a worked solution may have more than 131,072 characters
    with _open_text(path) as file:
        lines = csv.reader(iter(lambda: file.readline(LONGEST), ""), strict=True)
        try:
            names = [name.removeprefix("\ufeff") for name in next(lines, [])]
            for name in names:
                if names.count(name) > 1:
                    raise UserError(f"{path}: two columns are called {name!r:.60}; rename one")
            for values in lines:
                if len(names) == 1 and (other := _OTHER_SEPARATOR.search(names[0])):
                    raise UserError(f"{path}: {other[0]!r} separates its columns; write commas")
                if values and len(values) != len(names):
                    columns = f"{len(values)} values for {len(names)} columns"
                    raise UserError(
                        f"{path}:{lines.line_num}: {columns}; quote values that hold commas or "
                        "line ends"
                    )
                if values:
                    yield dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise UserError(f"{path}:{lines.line_num}: not a readable CSV file ({error})") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow.lib import ArrowException
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow; `pip install pyarrow`") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable parquet file ({one_line(error, 200)})") from None


def _read_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of a stream of Arrow, as save_to_disk writes it, or of an Arrow file."""
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise UserError(f"{path}: reading Arrow needs pyarrow; `pip install pyarrow`") from None
    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                batches: Any = ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                file = ipc.open_file(source)
                batches = map(file.get_batch, range(file.num_record_batches))
            for batch in batches:
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable Arrow file ({one_line(error, 200)})") from None


def _read_hub(name: str) -> Iterator[Row]:
    """Read ``owner/name[:config][@split]`` through the ``datasets`` library, which is optional."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{name}: no such file, and reading it from the hub needs the datasets library; `pip "
            "install datasets`, "
            "or give the path of a local copy"
        ) from None
    repository, _, split = name.partition("@")
    repository, _, config = repository.partition(":")
    try:
        rows = load_dataset(repository, config or None, split=split or "train")
    # the library raises anything from OSError to its own classes; all mean "not available"
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{name}: cannot load it from the hub ({reason})") from None
    yield from rows


def _files_of_directory(directory: Path) -> list[Path]:
    """Return the files of the data set in a directory: what save_to_disk wrote, the only data file,
    or all parts of one.
    """
    if (directory / _SPLITS).is_file():
        return _files_of_directory(_only_split(directory))
    if (directory / _STATE).is_file():
        return _files_of_state(directory)
    files = sorted(file for file in directory.iterdir() if file.name.endswith(SUFFIXES))
    shards = [_SHARD.fullmatch(file.name) for file in files]
    parts_of = {match and (match["split"], match["suffix"]) for match in shards}
    if files and len(parts_of) == 1 and None not in parts_of:
        _check_complete(files, str(directory))
        return files
    if len(files) == 1:
        return files
    names = ", ".join(file.name for file in files[:20]) or "none"
    raise UserError(
        f"{directory}: expected exactly one data file in this directory, or all parts of one, "
        f"found {names}; name the file, or a pattern such as {directory}/train-*.parquet"
    )


def _only_split(directory: Path) -> Path:
    splits = read_json_object(directory / _SPLITS).get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    if len(names) == 1 and (directory / names[0]).is_dir():
        return directory / names[0]
    raise UserError(
        f"{directory}: a data set with the splits {', '.join(names) or 'none'}; name one, as "
        f"{directory / (names[0] if names else 'train')}"
    )


def _files_of_state(directory: Path) -> list[Path]:
    """Return the Arrow files that ``state.json`` of save_to_disk lists."""
    listed = read_json_object(directory / _STATE).get("_data_files")
    files = []
    for entry in listed if isinstance(listed, list) else ():
        name = entry.get("filename") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not (directory / name).is_file():
            raise UserError(
                f"{directory}: {_STATE} lists {name!r:.60}, which is not there; copy the whole "
                "folder"
            )
        files.append(directory / name)
    if not files:
        raise UserError(f"{directory}: {_STATE} lists no data file")
    return files


def _check_complete(files: list[Path], source: str) -> None:
    """Raise :class:`UserError` if a part of a data set in numbered parts is missing, or is there
    twice under several fingerprints. Parts are counted from 0, or from 1 if the last one is there.
    """
    present: dict[tuple[str, int], dict[int, Path]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match is None:
            continue
        key = (str(file.with_name(match["split"])), int(match["total"]))
        parts = present.setdefault(key, {})
        number = int(match["number"])
        if number in parts:
            raise UserError(
                f"{source}: {parts[number].name} and {file.name} are the same part; remove the old "
                "one, or name the files to read"
            )
        parts[number] = file
    for (split, total), parts in present.items():
        first = 1 if total in parts and 0 not in parts else 0
        missing = sorted(set(range(first, first + total)) - set(parts))
        if missing:
            raise UserError(
                f"{source}: {len(missing)} of the {total} parts of {split} are missing, the first "
                f"is {split}-{missing[0]:05d}-of-{total:05d}; fetch them, or name the files to read"
            )


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` may be a data set of the hub, ``owner/name[:config][@split]``."""
    return (
        bool(_HUB_NAME.match(name))
        and not name.startswith(".")
        and not name.partition("@")[0].endswith(SUFFIXES)
    )
