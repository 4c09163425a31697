"""moto as an object store in memory, for tests: `python store.py HOST PORT`.

Like `moto_server`, but requests that change the store run one after another. moto checks whether an
object exists and then writes it, so two concurrent creations of one object may both succeed, which
makes a store unfit for a yard."""

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
    """A WSGI application that serializes requests that change something."""
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in READING:
            return application(environ, start)
        with lock:
            return application(environ, start)

    return answer


def main(host: str, port: int) -> None:
    """Serve until a signal."""
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # PID 1 has no default handler
    moto = one_after_another(DomainDispatcherApplication(create_backend_app))
    run_simple(host, port, moto, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
