"""The command line: one module per verb, each with ``add_parser(subparsers)`` and ``run(args) ->
exit status``.

At the end: options and types of arguments that several verbs share.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_dcpo import __version__
from megatron_dcpo.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    Stopped,
    UserError,
    one_line,
)
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from megatron_dcpo.config import Config
    from megatron_dcpo.sandbox.local import CodeLimits

    # argparse has no public name for what add_subparsers returns
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

VERBS = {
    "train": "train a policy",
    "config": "the options of a run, and the shipped examples",
    "launch": "start a verb on several processes or nodes",
    "evaluate": "accuracy and calibration of a model",
    "report": "one self-contained HTML page comparing runs",
    "judge": "judge pairs of prediction and reference",
    "calibrate": "fit a post-hoc confidence on judged samples",
    "convert": "Hugging Face <-> Megatron checkpoints",
    "objective": "rewards, advantages and loss of a few responses, without a model",
    "plan": "what a run will need: memory per GPU, bytes moved, time per step",
    "probe": "gradient conflict and variance on a policy",
    "doctor": "check this installation",
}
_DISK_REFUSES = (  # full or read-only; then paths that cannot be what they are named as
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Bad input is one line on stderr and status 2; results go to stdout, logs to
    stderr.
    """
    args = _parsed(sys.argv[1:] if argv is None else argv)
    _write_safely(args.debug)
    for noisy in (
        "httpx",
        "httpx2",
        "httpcore2",
        "urllib3",
        "matplotlib",
        "torch",
        "transformers",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(printable(f"dcpo {args.verb}: {stopped}"), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(
            stopped.exit_status
        )  # everything is saved; a judge may still be busy with the abandoned rollout
    except BrokenPipeError:  # the reader of stdout has enough: dcpo config | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError, ModuleNotFoundError) as error:
        refusal = _refusal(error)
        if args.debug or refusal is None:
            raise
        if os.environ.get("RANK", "0") == "0" or _ranks_differ():
            print(printable(f"dcpo {args.verb}: error: {refusal}"), file=sys.stderr)
        _tell_launcher(refusal)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"dcpo {args.verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments. Only the module of the verb that is called is imported, so that
    help answers at once.
    """
    parser = argparse.ArgumentParser(
        prog="dcpo",
        description="Reinforcement learning from verifiable rewards, accurate and calibrated.",
    )
    parser.add_argument(
        "--version", action="version", version=f"megatron-dcpo {__version__}"
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    called = next((word for word in words if not word.startswith("-")), None)
    for verb, text in VERBS.items():
        if verb == called:
            importlib.import_module(f"megatron_dcpo.cli.{verb}").add_parser(subparsers)
        else:
            subparsers.add_parser(verb, help=text)
    for subparser in subparsers.choices.values():
        subparser.add_argument(
            "--debug", action="store_true", help="show tracebacks and debug logs"
        )
    args, rest = parser.parse_known_args(as_options(words))
    if rest:
        # argparse takes overrides in one piece only; those after a later option arrive here
        overrides = all("=" in word and not word.startswith("-") for word in rest)
        if not (hasattr(args, "overrides") and overrides):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    return args


def _refusal(error: UserError | OSError | ModuleNotFoundError) -> str | None:
    """Return the line that says what the user can mend; None for an error of the program."""
    if isinstance(error, ModuleNotFoundError):
        ours = (error.name or "megatron_dcpo").startswith("megatron_dcpo")
        return (
            None
            if ours
            else f"{error.name} is not installed; call dcpo of .venv (make setup)"
        )
    return (
        str(error)
        if isinstance(error, UserError) or error.errno in _DISK_REFUSES
        else None
    )


def as_options(words: Sequence[str]) -> list[str]:
    """Return the words of a verb that takes overrides as its parser has them: ``train x.yaml``
    names the configuration, ``--section.key value`` is an override, a bare ``--resume`` means
    ``auto``.
    """
    if not words or words[0] not in ("train", "plan", "probe", "evaluate"):
        return list(words)
    verb, *rest = words
    names_config = (
        verb != "evaluate"
    )  # whose YAML files belong to --config and --as-trained
    found: list[str] = []
    while rest:
        word, *rest = rest
        name, equal, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and "." in name:
            value, rest = (value, rest) if equal or not rest else (rest[0], rest[1:])
            found.append(f"{name}={value}")
        elif word == "--resume" and rest[:1] not in (["auto"], ["none"]):
            found += [word, "auto"]
        elif (
            names_config
            and word.endswith((".yaml", ".yml"))
            and "--config" not in (*words, *found)
            and "=" not in word
        ):
            found += ["--config", word]
        else:
            found.append(word)
    return [verb, *found]


def _write_safely(debug: bool) -> None:
    """Write logs and tracebacks, which quote what others wrote: nothing of it may steer the
    terminal, and no character end a run.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Formatter("%(asctime)s %(name)s: %(message)s" if debug else "%(message)s")
    )
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, handlers=[handler]
    )
    logging.captureWarnings(True)
    sys.excepthook = _print_traceback
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(
        printable("".join(traceback.format_exception(kind, error, trace)), lines=True)
    )
    _tell_launcher(f"{kind.__name__}: {error}")


def _tell_launcher(message: str) -> None:
    """Write the error that ends this rank where ``dcpo launch`` and torchrun read it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from megatron_dcpo.runtime.files import write_atomically

        with contextlib.suppress(OSError):
            write_atomically(
                Path(file),
                json.dumps(
                    {"message": one_line(message, 500), "timestamp": int(time.time())}
                ),
            )


def _ranks_differ() -> bool:
    """Return whether ranks may have errors of their own: before the process groups exist all meet
    the same one, and one line is enough.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Call ``config.load_config``; a file that is not there is reported before the schema and its
    libraries are imported.
    """
    if all("=" in override for override in overrides) and not Path(path).is_file():
        raise UserError(f"config file {Path(path)} does not exist")
    from megatron_dcpo.config import load_config

    return load_config(path, list(overrides))


def add_judging_arguments(parser: argparse._ActionsContainer) -> None:
    """Add a user's verifier, where programs run, and the limits of both (``program_limits``)."""
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="exact, f1, choice, or your own, file.py:function or https://host "
        "(docs/bring_your_own.md#a-verifier)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="S",
        help="least score of a right response (default 1)",
    )
    parser.add_argument(
        "--sandbox",
        metavar="WHERE",
        help="where programs run: auto, bubblewrap, landlock, or unsafe (default auto)",
    )
    parser.add_argument(
        "--test-seconds",
        type=float,
        metavar="S",
        help="wall time of one test, or one call of --verifier (default 6)",
    )
    parser.add_argument(
        "--program-seconds",
        type=float,
        metavar="S",
        help="wall time of all tests of a program (default 60)",
    )
    parser.add_argument(
        "--memory-mb",
        type=positive_int,
        metavar="MB",
        help="memory of either (default 1024)",
    )


def program_limits(args: argparse.Namespace) -> CodeLimits:
    """Return the limits as given, the defaults of ``CodeLimits`` otherwise. Raises
    :class:`UserError`.
    """
    from megatron_dcpo.sandbox.local import CodeLimits

    names = ("test_seconds", "program_seconds", "memory_mb")
    return CodeLimits(
        **{name: vars(args)[name] for name in names if vars(args).get(name) is not None}
    )


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, got {text!r}"
        )
    return value
