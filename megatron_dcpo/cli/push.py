"""``dcpo push RUN --to OWNER/NAME``: a run's policy, or an adapter, with its model card on the
hub.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.runtime.hub_upload import Contents


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "push",
        help=VERBS["push"],
        description="Upload the policy of a run, or an adapter, to the hub, with a model card from "
        "the records of the run and the evaluation in RUN/eval. Only the files of a model are "
        "uploaded; checkpoints, other files, and files with a key in them are refused. The token "
        "is that of HF_TOKEN or hf auth login.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN",
        help="directory of a run (its policy/, or its adapter/ if it has no policy), or one of the "
        "two directories",
    )
    parser.add_argument("--to", required=True, metavar="NAME", help="OWNER/NAME on the hub")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument(
        "--revision",
        default="",
        metavar="BRANCH",
        help="branch, made if it does not exist; a repository that has files is changed only if "
        "one is named",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the files and their sizes, upload nothing"
    )
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.runtime.hub_upload import check_no_keys, size_of, upload

    directory = pushed_directory(Path(args.run_dir))
    files = files_with_card(directory)
    check_no_keys(files)
    sizes = {name: size_of(content) for name, content in files.items()}
    url = None
    if not args.dry_run:
        logging.getLogger(__name__).info("uploading %.2f GB", sum(sizes.values()) / 1e9)
        url = upload(
            files,
            args.to,
            private=args.private,
            revision=args.revision,
            message=f"Upload {directory.name} of {directory.resolve().parent.name}",
        )
    if args.json:
        print(json.dumps({"to": args.to, "files": sizes, "commit": url}, indent=1))
        return 0
    for name, size in sizes.items():
        print(printable(f"{size:>15,}  {name}"))
    print(printable(f"wrote {url}" if url else f"nothing was uploaded to {args.to} (--dry-run)"))
    return 0


def pushed_directory(named: Path) -> Path:
    """Return the directory of the policy or the adapter that is uploaded. Raises
    :class:`UserError`.
    """
    for directory in (named, named / "policy", named / "adapter"):
        if any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
            return directory
    if not named.is_dir():
        raise UserError(f"{named}: no such run directory")
    raise UserError(
        f"{named} has neither policy/ nor adapter/: its training has not ended; "
        "make one by dcpo convert export --from "
        f"{named / 'checkpoints'} --to {named / 'policy'}"
    )


def files_with_card(directory: Path) -> Contents:
    """Return the files of the model with its card as the records of the run are now, unless the
    card in the directory was written by hand.
    """
    from megatron_dcpo.evaluation.card import CARD, DIAGRAM, MARKER, model_card
    from megatron_dcpo.runtime.hub_upload import files_of_model

    files = files_of_model(directory)
    own = directory / CARD
    if own.is_file() and MARKER not in own.read_text(encoding="utf-8", errors="replace"):
        return files
    card = model_card(directory.resolve().parent, directory)
    files[CARD] = card.text.encode()
    if card.diagram:
        files[DIAGRAM] = card.diagram
    return dict(sorted(files.items()))
