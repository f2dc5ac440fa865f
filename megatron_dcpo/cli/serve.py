"""``dcpo serve``: an OpenAI-compatible proxy whose answers carry a calibrated confidence."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, positive_int
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable
from megatron_dcpo.serving.scoring_options import add_scoring_arguments

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.serving.bounds import Bounds

logger = logging.getLogger(__name__)

_WAITING = 2048  # connections that the kernel holds until they are accepted
_OBJECTS = 50_000  # that are made before the garbage collector looks at them
# after which a thread that reads a large reply lets the others go on
_TURN_SECONDS = 0.001
_MB = 1 << 20
# name, default and help of what is limited
_BOUNDS = (
    ("max-request-mb", 16, "size of a request"),
    ("max-reply-mb", 32, "size of an answer that is read, and of a stream that is scored"),
    ("max-concurrent", 1024, "requests at a time; more have the status 429"),
    ("client-seconds", 20, "time for the head of a request; its body has three times as long"),
    ("grace", 10, "seconds that answers go on for when the server is ended"),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help=VERBS["serve"],
        description="Pass requests on to an OpenAI-compatible server, and add to each choice of "
        "its answers confidence, confidence_raw and confidence_source. What cannot be computed is "
        "null, and confidence_reason says why. The page at / asks a question, /metrics is for "
        "Prometheus (docs/serve.md).",
    )
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="URL",
        help="address of the server, usually ending in /v1",
    )
    add_scoring_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    parser.add_argument("--port", type=int, default=8100, help="default 8100")
    parser.add_argument(
        "--example", default="", metavar="TEXT", help="a question that the page at / offers"
    )
    parser.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the key for the server: the models are listed with it, and "
        "with --api-key-file all requests are sent with it (default OPENAI_API_KEY)",
    )
    _add_access_arguments(parser)
    _add_bound_arguments(parser)
    parser.set_defaults(run=run)


def _add_access_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help="answer only requests with one of the keys in this file (one a line) as bearer token",
    )
    parser.add_argument(
        "--allow-anyone",
        action="store_true",
        help="listen on another --host than this machine without keys: whoever reaches the port "
        "can use the server behind it",
    )


def _add_bound_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, words in _BOUNDS:
        parser.add_argument(
            f"--{name}",
            type=positive_int,
            default=default,
            metavar="N",
            help=f"{words} (default {default})",
        )


def run(args: argparse.Namespace) -> int:
    import httpx2
    from prometheus_client import CollectorRegistry

    from megatron_dcpo.runtime.http_json import without_password
    from megatron_dcpo.runtime.local_names import is_loopback
    from megatron_dcpo.runtime.served_models import check_address, list_models
    from megatron_dcpo.serving.access import guarded, read_keys
    from megatron_dcpo.serving.calibrator import check_models, names_of
    from megatron_dcpo.serving.middleware import service_of
    from megatron_dcpo.serving.proxy import proxy_app
    from megatron_dcpo.serving.scoring_options import scorer_of
    from megatron_dcpo.serving.server import Timeouts, server_of

    check_address(args.endpoint)
    keys = read_keys(args.api_key_file) if args.api_key_file else ()
    _check_reach(args, is_loopback(args.host))
    scorer = scorer_of(args)
    api_key = os.environ.get(args.api_key_env) or None
    fix = "a proxy needs a server that lists them"
    rows = list_models(args.endpoint, fix, api_key)
    names = names_of(rows)
    if scorer.calibrator is not None:
        check_models(scorer.calibrator, args.calibrator, names)
    registry = CollectorRegistry()
    service = service_of(scorer, registry, names, _bounds(args))
    app = proxy_app(args.endpoint, service, registry, api_key if keys else None, args.example)
    listening = _listen(args.host, args.port)
    timeouts = Timeouts(head=args.client_seconds)
    server = server_of(guarded(app, is_loopback(args.host), keys), args.grace, timeouts)
    host, port = listening.getsockname()[:2]
    url = httpx2.URL(scheme="http", host=host, port=port, path="/v1")
    endpoint = without_password(args.endpoint)
    print(printable(f"{url} passes requests on to {endpoint}; Ctrl-C ends it"), flush=True)
    # what is imported stays: the garbage collector need not look at it again and again, nor at
    # every few hundred of the objects that a reply consists of
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    sys.setswitchinterval(_TURN_SECONDS)
    server.run(sockets=[listening])
    return 0


def _check_reach(args: argparse.Namespace, is_local: bool) -> None:
    """Raise :class:`UserError` for an address that others reach, unless there are keys or the user
    says that anyone may ask.
    """
    if is_local or args.api_key_file:
        return
    if not args.allow_anyone:
        raise UserError(
            f"--host {args.host}: others than this machine could use the server behind it; give "
            "--api-key-file, or --allow-anyone"
        )
    logger.warning(
        "--allow-anyone: whoever reaches %s can use the server behind it, and read the metrics",
        args.host,
    )


def _bounds(args: argparse.Namespace) -> Bounds:
    from megatron_dcpo.serving.bounds import Bounds

    return Bounds(
        request_bytes=args.max_request_mb * _MB,
        reply_bytes=args.max_reply_mb * _MB,
        body_seconds=3 * args.client_seconds,
        concurrent=args.max_concurrent,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises :class:`UserError` for an address that cannot be
    used.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: a port is between 0 and 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_WAITING)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: {error.strerror or error}; choose another one"
        ) from None
