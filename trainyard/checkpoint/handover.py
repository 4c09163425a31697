"""Hands tensors to the rank of the same host that writes them, while it writes.

Over Unix sockets with abstract names: they take no shared memory and no folder, need only the same
network namespace, and end with their process, so that the other side notices a killed rank. The
kernel holds some 200 kB for each, so no rank keeps tensors of another in memory."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainyard.artifacts.process import machine_mark
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.ranks import Ranks
from trainyard.errors import CommunicationError

SECRET_BYTES = 16
"""Every user of a host can connect to an abstract name; only ranks of the run know the secret."""

GREETING = struct.Struct(f"<{SECRET_BYTES}sI")
"""What a rank sends first: the secret, and its number."""

CONNECT_SECONDS = 30.0
"""How long a rank waits for another one's connection, or for its door."""

GREETING_SECONDS = 1.0
"""How long a connection may take to greet once it is accepted. Ranks have greeted before that, so
only a stranger takes longer."""


class Address(NamedTuple):
    """Where a rank can be reached."""

    name: bytes
    secret: bytes


class Door(Closing):
    """Accepts connections from ranks of the same host."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_SECONDS)
        self._socket.bind(f"\0trainyard-{secrets.token_hex(16)}")
        self._socket.listen(socket.SOMAXCONN)
        self._lines: dict[int, socket.socket] = {}

    @property
    def address(self) -> Address:
        """For `connect` in other ranks."""
        return Address(self._socket.getsockname(), self._secret)

    def accept(self, ranks: Collection[int]) -> Mapping[int, socket.socket]:
        """The connections of these ranks, which have connected before; `close` closes them."""
        while missing := set(ranks) - self._lines.keys():
            try:
                line, _ = self._socket.accept()
            except TimeoutError as error:
                raise _lost(min(missing), "after it had connected") from error
            rank = self._greeted(line)
            if rank in missing:
                self._lines[rank] = line
            else:
                line.close()
        return self._lines

    def _greeted(self, line: socket.socket) -> int | None:
        """The rank that a connection is of; None for one that does not know the secret."""
        line.settimeout(GREETING_SECONDS)
        try:
            greeting = line.recv(GREETING.size, socket.MSG_WAITALL)
            secret, rank = GREETING.unpack(greeting)
            line.settimeout(None)
        except (OSError, struct.error):
            return None
        return int(rank) if hmac.compare_digest(secret, self._secret) else None

    def close(self) -> None:
        """End all connections, those that wait to be accepted too."""
        self._socket.close()
        for line in self._lines.values():
            _end(line)
        self._lines.clear()


def connect(address: Address, rank: int) -> socket.socket:
    """A connection of this rank to the door of another one. Raises OSError."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(CONNECT_SECONDS)
        line.connect(address.name)
        line.sendall(GREETING.pack(address.secret, rank))
        line.settimeout(None)
    except BaseException:
        line.close()
        raise
    return line


def find_places(ranks: Ranks) -> Ranks:
    """The ranks, with those marked that can hand each other tensors; all of them call it.

    Ranks with the same host name, boot and network namespace try to connect."""
    if ranks.world_size == 1:
        return ranks
    mark = f"{socket.gethostname()}/{machine_mark('net')}"
    with ExitStack() as stack:

        def listen() -> tuple[str, Address | None]:
            try:
                return mark, stack.enter_context(Door()).address
            except OSError:  # a system without abstract names
                return mark, None

        doors = ranks.gather(listen)
        firsts: dict[str, int] = {}
        for rank, (found, _) in enumerate(doors):
            firsts.setdefault(found, rank)

        def is_reached() -> bool:
            address = doors[firsts[mark]][1]
            try:
                if address is not None:
                    connect(address, ranks.rank).close()
                return address is not None
            except OSError:
                return False

        reached = ranks.gather(is_reached)
    places = (
        firsts[found] if is_reached else rank
        for rank, ((found, _), is_reached) in enumerate(zip(doors, reached, strict=True))
    )
    return replace(ranks, places=tuple(places))


@dataclass(frozen=True, slots=True)
class Received:
    """A tensor of another rank, as a piece of a file (`safetensors.joined.FilePiece`)."""

    line: socket.socket
    rank: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    def put(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the next bytes; pieces come in the order in which they are sent."""
        while memory:
            try:
                length = self.line.recv_into(memory)
            except OSError as error:
                raise _lost(self.rank, "while it sent its tensors") from error
            if not length:
                raise _lost(self.rank, "before it had sent its tensors")
            memory = memory[length:]


def _lost(rank: int, when: str) -> CommunicationError:
    return CommunicationError(f"rank {rank} failed to save: it was lost or failed {when}")


class Lines(Closing):
    """This rank's connections for one step. An error of one side must close them before the next
    collective, or the other side waits for bytes there."""

    def __init__(self) -> None:
        self._door: Door | None = None
        self._writer: socket.socket | None = None

    def listen(self) -> Address:
        """Where ranks whose tensors this one writes can connect."""
        self._door = Door()
        return self._door.address

    def dial(self, address: Address, rank: int) -> None:
        """Connect to the rank that writes this one's tensors."""
        self._writer = connect(address, rank)

    def received(self, ranks: Collection[int]) -> Mapping[int, socket.socket]:
        """The connections of ranks whose tensors this one writes."""
        return {} if self._door is None else self._door.accept(ranks)

    def send(self, data: memoryview) -> bool:
        """Send bytes to the writer; False if it is gone, or has failed, which it tells itself."""
        assert self._writer is not None
        try:
            self._writer.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def close(self) -> None:
        """End all connections."""
        if self._door is not None:
            self._door.close()
        if self._writer is not None:
            _end(self._writer)
            self._writer = None


def open_lines(writers: Mapping[int, int], ranks: Ranks) -> Lines:
    """Connect the ranks, all of which call it with the same `writers`: of each rank that hands over
    tensors, the rank that writes them."""
    takers = set(writers.values())
    if not takers:
        return Lines()
    lines = Lines()
    try:
        addresses = ranks.gather(lambda: lines.listen() if ranks.rank in takers else None)

        def dial() -> None:
            if ranks.rank in writers:
                address = addresses[writers[ranks.rank]]
                assert address is not None
                lines.dial(address, ranks.rank)

        # Afterwards all connections wait at the doors: none that accepts waits for a lost rank.
        ranks.gather(dial)
    except BaseException:
        lines.close()
        raise
    return lines


def _end(line: socket.socket) -> None:
    """Close a connection, even if a child process has a copy of it."""
    with suppress(OSError):  # the other side has closed it
        line.shutdown(socket.SHUT_RDWR)
    line.close()
