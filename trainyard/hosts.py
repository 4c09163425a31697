"""The addresses that our servers listen on, and the host names that they answer to.

A page of another site can let its own name resolve to 127.0.0.1 (DNS rebinding). The browser then
treats our answers as that page's; only the header Host still has the foreign name."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

OURS = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine that cannot resolve to another one."""
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z_.-]+)(:\d{1,5})?")

RULE = "a request must have one header Host with a name"


def host_name(headers: Sequence[str]) -> str | None:
    """The name in the header Host, without its port; None unless there is exactly one."""
    found = HOST.fullmatch(headers[0].lower()) if len(headers) == 1 else None
    return None if found is None else found[1].strip("[]")


def not_ours(name: str) -> str:
    """The answer to a request under a foreign name."""
    return (
        f"this server does not answer to the name {name}: ask for 127.0.0.1 or localhost, or start "
        f"it with --allow-host {name}"
    )


def address(host: str, port: int) -> str:
    """The URL of a server, without a path."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def is_of_this_machine(host: str) -> bool:
    """Whether only this machine can reach a server at this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
