"""What the processes of a run listen on, as the kernel knows it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTEN = "0A"


def listeners(process: int) -> set[tuple[str, int]]:
    """Address and port of each TCP socket on which a process or one of its children listens."""
    inodes = {inode for one in descendants(process) for inode in _sockets(one)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((str(_address(address)), int(port, 16)))
    return found


def descendants(process: int) -> Iterator[int]:
    """The process and all that it started, directly or not."""
    yield process
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in children:
        yield from descendants(int(child))


def beyond_loopback(found: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those that something outside this machine reaches."""
    return {one for one in found if not ip_address(one[0]).is_loopback}


def reaches(address: str, port: int) -> bool:
    """Whether a connection to it is accepted."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def _sockets(process: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")


def _address(text: str) -> IPv4Address | IPv6Address:
    """As in /proc/net/tcp: words of four bytes, each the other way round."""
    packed = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address
