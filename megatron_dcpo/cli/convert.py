"""``dcpo convert``: convert Hugging Face directories to Megatron checkpoints and back, streaming
and bit-exact.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, positive_int
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.conversion.common import Conversion, Progress

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help=VERBS["convert"],
        description="Convert weights between a Hugging Face directory and a Megatron torch_dist "
        "checkpoint, which any tensor, pipeline and virtual pipeline layout can load. The weights "
        "are streamed, so that memory does not grow with the model.",
    )
    directions = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    imports = directions.add_parser("import", help="Hugging Face directory -> Megatron checkpoint")
    exports = directions.add_parser("export", help="Megatron checkpoint -> Hugging Face directory")
    add_import_arguments(imports)
    add_export_arguments(exports)
    for direction in (imports, exports):
        direction.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.set_defaults(run=run)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        "--hf-path",
        "--load-dir",
        dest="source",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face directory (config.json and *.safetensors), or a name on the hub",
    )
    parser.add_argument(
        "--to",
        "--megatron-path",
        "--save-dir",
        dest="target",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint to write",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=positive_int,
        default=128,
        metavar="N",
        help="Megatron's option; the vocabulary is padded to a multiple of this x tensor parallel "
        "size (default 128)",
    )
    parser.add_argument(
        "--tensor-model-parallel-size",
        "--target-tensor-parallel-size",
        type=positive_int,
        default=1,
        metavar="TP",
        help="for the padding only: the checkpoint loads at any size (default 1)",
    )
    _add_common(parser)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        "--megatron-path",
        "--load-dir",
        dest="source",
        type=Path,
        required=True,
        metavar="DIR",
        help="Megatron checkpoint, or the directory whose latest_checkpointed_iteration.txt names "
        "one",
    )
    parser.add_argument(
        "--checkpoint",
        choices=("latest", "best"),
        default="latest",
        help="checkpoint of a training run: the newest, or the one that training.keep_best kept",
    )
    parser.add_argument(
        "--to",
        "--hf-path",
        "--save-dir",
        dest="target",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face directory to write",
    )
    parser.add_argument(
        "--hf-config",
        "--hf-model",
        type=Path,
        metavar="DIR",
        help="directory with config.json and tokenizer files (default: those that import left in "
        "the checkpoint, or else model.path of the run that saved it)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help="largest file, for instance 5GB (default: as in the imported model, or else 5GiB)",
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the result again and compare every tensor by hash",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
    parser.add_argument(
        "--json", action="store_true", help="print conversion.json instead of a line"
    )


def main(direction: str, description: str | None) -> int:
    """Run the whole program of ``tools/hf_to_megatron.py`` and ``tools/megatron_to_hf.py``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if direction == "import":
        add_import_arguments(parser)
    else:
        add_export_arguments(parser)
    args = parser.parse_args(namespace=argparse.Namespace(direction=direction))
    try:
        return run(args)
    except UserError as error:
        print(printable(f"{parser.prog}: error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.conversion.convert import export_checkpoint, import_checkpoint
    from megatron_dcpo.conversion.megatron_checkpoint import find_checkpoint
    from megatron_dcpo.runtime.hub import model_directory

    with _progress(args.direction) as progress:
        common = {"verify": args.verify, "overwrite": args.overwrite, "progress": progress}
        if args.direction == "import":
            result = import_checkpoint(
                Path(model_directory(str(args.source))),
                args.target,
                make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
                tensor_model_parallel_size=args.tensor_model_parallel_size,
                **common,
            )
        else:
            result = export_checkpoint(
                find_checkpoint(args.source, args.checkpoint),
                args.target,
                hf_config=args.hf_config,
                max_shard_bytes=args.max_shard_size,
                **common,
            )
    print(json.dumps(result.__dict__, indent=1) if args.json else _line(result))
    return 0


def _line(result: Conversion) -> str:
    """Return one line about a conversion."""
    moved = f"{result.bytes_moved / 1e9:.2f} GB in {result.seconds:.1f} s"
    peak = f"{result.peak_anonymous_bytes / 2**20:.0f} MiB"
    line = f"wrote {result.target}: {len(result.tensors)} tensors, {moved}, peak {peak}"
    if result.verify_seconds is not None:
        line += f", verified in {result.verify_seconds:.1f} s"
    return line


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """Show a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bars:
        task = bars.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield show


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write for instance 5GB or 500MiB"
        )
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))
