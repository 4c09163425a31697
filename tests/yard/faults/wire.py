"""A line to a server, which can be cut and mended: by TCP, or by a socket of this machine."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path


class Wire:
    """Passes on to `target` (`tcp://HOST:PORT` or `unix:///PATH`) what comes to `address`."""

    def __init__(self, target: str, folder: Path | None = None, at: str = "127.0.0.1") -> None:
        """folder: for the socket, where the target is one of this machine; at: the address of this
        machine to listen on, by TCP."""
        kind, _, place = target.partition("://")
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_cut = False
        self.refused = 0
        """Who came while it was cut."""
        if kind == "unix":
            assert folder is not None
            self._family, self._target = socket.AF_UNIX, place
            self.address = f"unix://{folder / 'wire.sock'}"
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(folder / "wire.sock"))
        else:
            host, port = place.rsplit(":", 1)
            self._family, self._target = socket.AF_INET, (host, int(port))
            listening = socket.socket()
            listening.bind((at, 0))
            self.address = f"{at}:{listening.getsockname()[1]}"
        listening.listen(64)
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def cut(self) -> None:
        """Break the connections, and refuse new ones."""
        self._is_cut = True
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def mend(self) -> None:
        """Let everything through again."""
        self._is_cut = False

    def _accept(self, listening: socket.socket) -> None:
        while True:
            here, _ = listening.accept()
            if self._is_cut:
                self.refused += 1
                here.close()
                continue
            there = socket.socket(self._family)
            there.connect(self._target)
            self._pairs.append((here, there))
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(2**16):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
