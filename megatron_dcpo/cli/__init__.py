"""The command line: one module per verb, each with ``add_parser(subparsers)`` and ``run(args)``,
which returns the exit status.

At the end are the options and the types of arguments that several verbs share.
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
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from megatron_dcpo import __version__
from megatron_dcpo.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    Stopped,
    UserError,
    did_you_mean,
    nearest,
    one_line,
    pip_install,
)
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.nearby_paths import places as places
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    # argparse has no public name for what add_subparsers returns
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

VERBS = {
    "train": "train a policy",
    "sft": "train a model on demonstrations: a warm start, the format of a confidence",
    "config": "the options of a run, and the shipped examples",
    "launch": "start a verb on several processes or nodes",
    "evaluate": "accuracy and calibration of a model",
    "report": "one self-contained HTML page comparing runs",
    "judge": "judge pairs of prediction and reference",
    "calibrate": "fit a post-hoc confidence on judged samples",
    "serve": "an OpenAI-compatible proxy whose answers carry a calibrated confidence",
    "convert": "Hugging Face <-> Megatron checkpoints",
    "objective": "rewards, advantages and loss of a few responses, without a model",
    "plan": "what a run will need: memory per GPU, bytes moved, time per step",
    "doctor": "check this installation",
}
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_LONGEST_USAGE = 5  # lines that are shown before an error
# the verbs that run on several ranks
_ON_RANKS = ("train", "sft", "evaluate")
# the verbs that take section.key=value, and those whose bare YAML file is the configuration
_TAKE_OVERRIDES = ("train", "sft", "plan", "evaluate", "calibrate")
_NAME_CONFIG = ("train", "sft", "plan")
# a disk is full or read-only, or a path is not the file or directory it should be
_DISK_REFUSES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Bad input gives one line on stderr and status 2; results go to stdout, logs to
    stderr.
    """
    try:
        args = _parsed(sys.argv[1:] if argv is None else argv)
        return _run(args)
    except KeyboardInterrupt:  # also while modules are imported
        print("dcpo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    """Run the verb of the arguments, and return its exit status."""
    _write_safely(args.debug)
    for noisy in ("httpx", "httpx2", "httpcore2", "urllib3", "matplotlib", "torch", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except Stopped as stopped:
        if not _first_rank_prints(args.verb):
            print(printable(f"dcpo {args.verb}: {stopped}"), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # everything is saved, but a judge may still be busy with the abandoned rollout
        os._exit(stopped.exit_status)
    except SystemExit as ended:
        if ended.code:
            raise
        # a verb returns its status; code of the user's, called by it, would end it as a success
        return _refused(args.verb, "sys.exit() of code that it called ended it early")
    except BrokenPipeError:  # the reader of stdout has enough: dcpo config | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError, ModuleNotFoundError) as error:
        refusal = _refusal(error)
        if args.debug or refusal is None:
            raise
        return _refused(args.verb, refusal)


def _refused(verb: str, refusal: str) -> int:
    """Say in one line why the verb ended, here and to the launcher; return its exit status."""
    if _ranks_differ() or not _first_rank_prints(verb):
        print(printable(f"dcpo {verb}: error: {refusal}"), file=sys.stderr)
    _tell_launcher(refusal)
    return EXIT_USER_ERROR


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments. Only the module of the called verb is imported, so that help
    appears at once.
    """
    parser = _Parser(
        prog="dcpo",
        description="Reinforcement learning from verifiable rewards, accurate and calibrated.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-dcpo {__version__}")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    called = next((word for word in words if not word.startswith("-")), None)
    if called is not None and called not in VERBS:
        near = nearest(called, VERBS, cutoff=0.6)
        hint = f"; did you mean {near!r}?" if near else ""
        parser.exit(
            EXIT_USER_ERROR,
            f"dcpo: error: unknown verb {called!r}{hint}; known: {', '.join(VERBS)}\n",
        )
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
        # argparse takes overrides in one piece only; those after a later option end up here
        overrides = all("=" in word and not word.startswith("-") for word in rest)
        if not (hasattr(args, "overrides") and overrides):
            usage = subparsers.choices[args.verb].format_usage()
            hint = did_you_mean(rest[0], re.findall(r"--[a-z][a-z-]*", usage))
            parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        args.overrides = [*args.overrides, *rest]
    return args


class _Parser(argparse.ArgumentParser):
    """A parser of a verb, whose errors are not buried under the options of a verb that has many."""

    def error(self, message: str) -> NoReturn:
        """Print a short usage or none, what is wrong and where all options are; exit with 2."""
        usage = self.format_usage()
        if usage.count("\n") > _LONGEST_USAGE:
            usage = ""
            message += f" ({self.prog} --help lists all options)"
        self.exit(EXIT_USER_ERROR, f"{usage}{self.prog}: error: {message}\n")


def _refusal(error: UserError | OSError | ModuleNotFoundError) -> str | None:
    """Return the line that says what the user can fix; None for an error of the program."""
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or "megatron_dcpo"
        if missing.startswith("megatron_dcpo"):
            return None
        if (Path(__file__).parents[2] / "Makefile").is_file():
            how = "call dcpo of .venv (make setup), or pip install '.[train]'"
        else:
            how = pip_install("train")
        return f"{missing} is not installed, which this verb needs; {how}"
    if isinstance(error, UserError) or error.errno in _DISK_REFUSES:
        return str(error)
    if error.errno in _TOO_MANY_FILES:
        return f"{error}; raise the limit of open files (ulimit -n)"
    return None


def as_options(words: Sequence[str]) -> list[str]:
    """Return the words of a verb that takes overrides in the form its parser expects.

    ``train x.yaml`` names the configuration, ``--section.key value`` is an override, and a bare
    ``--resume`` means ``auto``.
    """
    if not words or words[0] not in _TAKE_OVERRIDES:
        return list(words)
    verb, *rest = words
    needs_config = verb in _NAME_CONFIG and "--config" not in words
    options: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equal, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and "." in name:
            if not equal and rest:
                value = rest.pop(0)
            options.append(f"{name}={value}")
        elif word == "--resume" and rest[:1] not in (["auto"], ["none"], ["strict"]):
            options += [word, "auto"]
        elif needs_config and word.endswith((".yaml", ".yml")) and not equal:
            options += ["--config", word]
            needs_config = False
        else:
            options.append(word)
    return [verb, *options]


def _write_safely(debug: bool) -> None:
    """Set up logs and tracebacks. They quote foreign text, which must neither control the terminal
    nor end a run by a character that cannot be encoded.
    """
    form = "%(message)s"
    level = logging.INFO
    if debug:
        form = "%(asctime)s %(name)s: %(message)s"
        level = logging.DEBUG
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _print_traceback
    if not debug:
        threading.excepthook = _print_thread_error
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(printable(text, lines=True))
    _tell_launcher(f"{kind.__name__}: {error}")


def _print_thread_error(ended: threading.ExceptHookArgs) -> None:
    """Print a line for a library's thread that an error ended. TensorBoard's does when the disk is
    full, and the run goes on without it.
    """
    thread = ended.thread.name if ended.thread else "of a library"
    error = f"{ended.exc_type.__name__}: {one_line(ended.exc_value, 300)}"
    print(printable(f"dcpo: thread {thread} ended ({error})"), file=sys.stderr)


def _tell_launcher(message: str) -> None:
    """Write the error that ends this rank to the file that ``dcpo launch`` and torchrun read."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    from megatron_dcpo.runtime.files import write_atomically

    values = {"message": one_line(message, 500), "timestamp": int(time.time())}
    with contextlib.suppress(OSError):
        write_atomically(Path(file), json.dumps(values))


def _first_rank_prints(verb: str) -> bool:
    """Return whether the first rank of the job prints what this one would. A rank in the
    environment alone says nothing: a shell may have it from elsewhere.
    """
    return verb in _ON_RANKS and signals.under_launcher() and signals.launched_rank() != 0


def _ranks_differ() -> bool:
    """Return whether ranks may have different errors. Before the process groups exist, all ranks
    have the same one, and one line is enough.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise :class:`UserError` for the first of these options that is given, because it would be
    ignored; ``why`` follows its name. Their defaults are None, False or an empty text.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and value != "":
            raise UserError(f"--{name.replace('_', '-')} {why}")


def add_kinds_argument(parser: argparse._ActionsContainer) -> None:
    """Add the option that names the kinds of problem."""
    parser.add_argument(
        "--kinds",
        metavar="COLUMN",
        help="kinds of problem that AUROC is also measured within, and that the lookup goes by: "
        "benchmark, digits (of the answer), or a column of the data, as subject or level (default: "
        "the data's kind, if it names one)",
    )


def add_judging_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of verifiers, of the sandbox, and of the limits of both."""
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="exact, f1, choice, a verifier of yours as file.py:function or https://host "
        "(docs/bring_your_own.md#a-verifier), or several with weights, "
        "'{my.py:right: 0.7, my.py:short: 0.3}'",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="S",
        help="lowest score of a correct response (default 1)",
    )
    parser.add_argument(
        "--sandbox",
        metavar="WHERE",
        help="sandbox for programs: auto, bubblewrap, landlock, or unsafe (default auto)",
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
        help="memory limit of a program or verifier (default 1024)",
    )


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value
