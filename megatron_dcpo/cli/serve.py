"""``dcpo serve``: an OpenAI-compatible proxy whose answers carry a calibrated confidence."""

from __future__ import annotations

import argparse
import gc
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable
from megatron_dcpo.serving.arguments import add_scoring_arguments

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

_WAITING = 2048  # connections that the kernel holds until they are accepted
_OBJECTS = 50_000  # that are made before the garbage collector looks at them
_END_SECONDS = 5  # for requests that are under way when the server is ended


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help=VERBS["serve"],
        description="Pass requests on to an OpenAI-compatible server, and add to each choice of "
        "its answers confidence, confidence_raw and confidence_source. What cannot be computed is "
        "null, and confidence_reason says why. The page at / asks a question, /metrics is for "
        "Prometheus, /feedback takes verdicts (docs/serve.md).",
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
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the key with which the models are listed at the start; "
        "requests have the key of the client (default OPENAI_API_KEY)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvicorn
    from prometheus_client import CollectorRegistry

    from megatron_dcpo.runtime.served_models import check_address, list_models
    from megatron_dcpo.serving.adapter import served_adapter
    from megatron_dcpo.serving.calibrator import check_models
    from megatron_dcpo.serving.forward import Forward
    from megatron_dcpo.serving.middleware import ConfidenceMiddleware
    from megatron_dcpo.serving.options import names_of, scorer_of
    from megatron_dcpo.serving.service import build_service

    check_address(args.endpoint)
    scorer = scorer_of(args)
    api_key = os.environ.get(args.api_key_env) or None
    fix = "a proxy needs a server that lists them"
    rows = list_models(args.endpoint, fix, api_key)
    names = names_of(rows)
    reader = None
    if args.adapter:
        reader = served_adapter(args.adapter, scorer.marker, rows)
    if scorer.calibrator is not None:
        check_models(scorer.calibrator, args.calibrator, names)
    service = build_service(scorer, CollectorRegistry(), names, reader)
    app = ConfidenceMiddleware(Forward(args.endpoint), service)
    listening = _listen(args.host, args.port)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        # the answers have the upstream's headers
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    host, port = listening.getsockname()[:2]
    print(
        printable(f"http://{host}:{port}/v1 passes requests on to {args.endpoint}; Ctrl-C ends it"),
        flush=True,
    )
    # what is imported stays: the garbage collector need not look at it again and again, nor at
    # every few hundred of the objects that a reply consists of
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    return 0


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
