"""moto as an object store in memory, for tests: `python store.py HOST PORT`.

As `moto_server`, but for one thing: what changes the store is done one request after another. moto
looks whether an object is there and then writes it, so of several that create the same object at
once more than one may be told that it came first, and such a store is not fit for a yard."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

Start = Callable[..., Any]
Application = Callable[[dict[str, Any], Start], Iterable[bytes]]
READING = ("GET", "HEAD", "OPTIONS")


def one_after_another(application: Application) -> Application:
    """A WSGI application whose requests that change something wait for each other."""
    turn = threading.Lock()

    def answer(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in READING:
            return application(environ, start)
        with turn:
            return application(environ, start)

    return answer


def main(host: str, port: int) -> None:
    """Answer until somebody says stop."""
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # PID 1 has no default handler
    moto = one_after_another(DomainDispatcherApplication(create_backend_app))
    run_simple(host, port, moto, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
