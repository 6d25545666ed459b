"""Serve a model over HTTP as OpenAI's API does: faster, and with the same text as plain decoding."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence

from decode import Engine
from decode.request import NODES
from draftless_commands.shared.command import Parser, at_least, failing_clearly
from draftless_commands.shared.options import (
    add_model_options,
    add_proposer_options,
    choose_model,
    load_target,
    make_proposer,
)

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
KEY = "DRAFTLESS_API_KEY"
HOST_HELP = "the address that is listened to; 0.0.0.0 lets other machines in (default: %(default)s)"
KEY_HELP = f"what clients must send as a bearer token (default: ${KEY}; if that is not set, none)"
QUEUE_HELP = "requests that may wait besides those that are decoded; further ones get status 429 (default: %(default)s)"
KEPT_HELP = "memory for texts that have ended: one that begins alike is not read again (default: 256 MiB)"
GRACE_HELP = "seconds that running answers have after SIGTERM or Ctrl-C (default: %(default)s)"
EPILOG = """\
The routes are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics; / is a page to chat on
(docs/serve.md).
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise ValueError(f'this needs {", ".join(missing)}: pip install "draftless[serve]"')
        model = choose_model(args)
        with listen(args.host, args.port) as place:  # before the model is loaded: the port may be taken
            target = load_target(model)
            if target.tokenizer is None:
                raise ValueError("the model has no tokenizer; a server needs one")
            proposer, most = make_proposer(args, target, None), args.nodes or NODES
            engine = Engine(target, proposer, rows=args.rows, nodes=most, kept_bytes=args.kept_bytes)
            target.warm_up(args.rows)
            api_key = args.api_key or os.environ.get(KEY) or None  # an empty one is none
            run(engine, args.name or model.name, api_key, args.queue, args.grace, place)


def make_parser() -> Parser:
    parser = Parser(prog="draftless serve", description=__doc__, epilog=EPILOG)
    add, whole = parser.add_argument, at_least(1)
    add("--host", default="127.0.0.1", help=HOST_HELP)
    add("--port", type=at_least(0), default=8000, help="0 takes a free one (default: %(default)s)")
    add("--name", help="of the model, which clients may give (default: the last part of a folder, or a hub id)")
    add("--api-key", metavar="KEY", help=KEY_HELP)
    add("--rows", type=whole, default=8, metavar="N", help="requests that are decoded together (default: %(default)s)")
    add("--queue", type=at_least(0), default=64, metavar="N", help=QUEUE_HELP)
    add("--kept-bytes", type=at_least(0), default=1 << 28, metavar="N", help=KEPT_HELP)
    add("--grace", type=at_least(0), default=10, metavar="S", help=GRACE_HELP)
    add_model_options(parser)
    add_proposer_options(parser)
    parser.set_defaults(store=None)  # a server keeps no answers in a file
    return parser


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address. Raises ValueError if it is taken or not this machine's."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port} cannot be listened to: {error}") from error


def run(engine: Engine, name: str, api_key: str | None, queue: int, grace: int, place: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    from draftless_commands.server.app import GraceServer, Server, make_app

    host, port, *_ = place.getsockname()
    app = make_app(Server(engine, name, api_key, queue), host)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the server gives it back at its end: then that is clean
    print(f"draftless: {name} is served at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    GraceServer(app, engine, grace).run(sockets=[place])


if __name__ == "__main__":
    main()
