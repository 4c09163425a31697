"""The S3 store for development, as a process for a while."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.ports import free_port

STORE = Path(__file__).parents[1] / "deploy/dev/store.py"
START_SECONDS = 30


@contextmanager
def dev_store(output: IO[str] | int = subprocess.DEVNULL, **environment: str) -> Iterator[str]:
    """Its address. output: where it prints to. environment: variables of its process."""
    port = free_port()
    command = [sys.executable, str(STORE), "127.0.0.1", str(port)]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=output, stderr=output
    ) as server:
        try:
            _wait_for(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the S3 test server did not come up")
