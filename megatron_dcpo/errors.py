"""UserError, Stopped and the exit statuses of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

# Exit statuses of every verb besides 0 and Python's own 1 for an unforeseen exception
# (docs/checkpoints.md#exit-statuses).
EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3  # of dcpo plan
# another process of the job died or hung: start the job again with --resume auto
EXIT_PEER_LOST = 98
EXIT_REQUEUE = 99  # stopped by SIGTERM or SIGUSR1 and saved: Slurm's RequeueExit
EXIT_INTERRUPTED = 130
LONGEST_LIST = 60  # names in an error message


class UserError(Exception):
    """Bad input: one clear line naming the thing and the fix. The command line prints it and exits
    with status 2.
    """


class Stopped(Exception):
    """A signal asked the run to end, and what is done is saved. The process ends with
    ``exit_status``.
    """

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def one_line(message: object, longest: int | None = None) -> str:
    """Return a message of several lines as one, cut at ``longest`` characters."""
    return " ".join(str(message).split())[:longest]


def nearest(word: object, known: Iterable[str], cutoff: float = 0.4) -> str | None:
    """Return the one of ``known`` that is most like ``word``; None when none is at least ``cutoff``
    (0 to 1) like it.
    """
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of an error message: ``; did you mean 'x'?`` with the nearest of ``known``, or
    the list of names if there are at most ``LONGEST_LIST``; else nothing.
    """
    known = list(known)
    near = nearest(word, known)
    if near:
        return f"; did you mean {near!r}?"
    return f"; valid: {', '.join(known)}" if len(known) <= LONGEST_LIST else ""


def validated_name(error: ValidationError) -> str:
    """Return the dotted name of the first thing wrong, without the tags in parentheses that say
    which of several types a value was read as.
    """
    parts = [str(part) for part in error.errors()[0]["loc"]]
    return ".".join(part for part in parts if not part.startswith("("))


def validation_message(error: ValidationError) -> str:
    """Return the first thing wrong in a pydantic ``ValidationError``, one line: ``section.key: what
    is wrong (found value)``.
    """
    first = error.errors()[0]
    message = one_line(first["msg"]).removeprefix("Value error, ")
    name = validated_name(error)
    if not isinstance(first["input"], str | int | float | bool | list | type(None)):
        return f"{name}: {message}".removeprefix(": ")
    return f"{name}: {message} (found {first['input']!r})"


def pip_install(extra: str) -> str:
    """Return the line that installs the packages of an ``extra`` of pyproject.toml, wherever this
    package came from.
    """
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        listed = [Requirement(text) for text in requires("megatron-dcpo") or ()]
    except PackageNotFoundError:  # run from a checkout that is not installed
        listed = []
    packages = []
    for wanted in listed:
        marker, wanted.marker = wanted.marker, None
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            packages.append(f"'{wanted}'")
    isolation = "--no-build-isolation " * (
        extra == "gpu"
    )  # it is built against the torch that is installed
    return f"pip install {isolation}" + (" ".join(packages) or f"'.[{extra}]'")


def port_in_use(error: BaseException, where: str) -> str | None:
    """Return what to say of an error of torch's store whose port another process has; None of other
    errors.
    """
    if "EADDRINUSE" not in str(error):
        return None
    port = str(error).partition("port: ")[2].partition(",")[0]
    return f"port {port} ({where}) is in use by another process; choose another one"


def check_world_size(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    context_parallel_size: int,
    processes: int,
    experts: int = 1,
) -> None:
    """Raise :class:`UserError` when the model-parallel size does not divide the number of
    ``processes``. ``experts``: the ranks of a pipeline stage that have all experts.
    """
    model_parallel = (
        tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    )
    context = (
        f" x context_parallel_size={context_parallel_size}" if context_parallel_size > 1 else ""
    )
    if processes % model_parallel:
        raise UserError(
            f"parallel: tensor_model_parallel_size={tensor_model_parallel_size} x "
            "pipeline_model_parallel_size="
            f"{pipeline_model_parallel_size}{context} = {model_parallel} does not divide the "
            f"{processes} process(es) started; start a multiple of {model_parallel}, as by dcpo "
            f"launch {model_parallel} -- train ..."
        )
    if processes % (experts * pipeline_model_parallel_size):
        raise UserError(
            f"parallel: expert_model_parallel_size x expert_tensor_parallel_size = {experts}, x "
            "pipeline_model_parallel_size"
            f"={pipeline_model_parallel_size}, does not divide the {processes} process(es) "
            "started; launch a multiple of it"
        )
