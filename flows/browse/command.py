"""The command line.

    python -m flows.browse --root URL [--host 127.0.0.1] [--port 4201] [--allow-host NAME]

Serves until SIGTERM or SIGINT, with exit status 0 then, and 2 for a wrong option."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from flows.browse.root import Root
from flows.browse.server import BrowseServer
from flows.cli.options import add_listening, cannot_listen
from flows.cli.run_flow import fail
from trainyard.arguments import Parser
from trainyard.errors import InfrastructureError, Stopped, TrainyardError
from trainyard.hosts import address, is_of_this_machine

PORT = 4201
LOOK_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a root; returns the exit status."""
    given = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        root = Root(given.root)
        server = bound(root, given.host, given.port, given.allow_host)
        if given.end_with is not None:
            threading.Thread(target=_end_with, args=(given.end_with,), daemon=True).start()
        with server:
            _say(server, given.host)
            # Serve first: health checks get an answer, however long the first listing takes.
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                _try_out(root)
                while True:  # not signal.pause(): it would miss a signal that comes just before it
                    time.sleep(LOOK_SECONDS)
            finally:
                server.shutdown()  # a loop that serves a closed socket takes a whole core
    except Stopped:
        return 0
    except TrainyardError as error:
        return fail(error)


def bound(root: Root, host: str, port: int, names: Sequence[str] = ()) -> BrowseServer:
    """A server on its port; ConfigError if it cannot listen there."""
    try:
        return BrowseServer(root, host, port, names)
    except (OSError, OverflowError) as error:
        raise cannot_listen(host, port, error) from error


def _say(server: BrowseServer, host: str) -> None:
    print(f"{server.root.url} is shown at {address(host, server.server_port)}/", flush=True)
    if not is_of_this_machine(host):
        print(
            f"warning: other machines can reach {host}, and there is no password",
            file=sys.stderr,
        )


def _try_out(root: Root) -> None:
    """Fail at once on wrong credentials or a missing bucket; warn of an unavailable store."""
    try:
        root.entries("")
    except InfrastructureError as error:
        logging.getLogger(__name__).warning("%s", error)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(number: int, _frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)  # already ending
    raise Stopped(number)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.browse",
        description="Serve the files of a yard to browsers: run cards, logs, manifests.",
    )
    parser.add_argument("--root", required=True, help="folder or s3:// URL of all runs")
    add_listening(parser, PORT)
    parser.add_argument(
        "--end-with",
        type=int,
        metavar="PID",
        help="end when this process, which started it, ends",
    )
    return parser
