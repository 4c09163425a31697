"""The names by which a server of ours may be called.

A page of a foreign site can have its own name resolved to 127.0.0.1 (DNS rebinding). The browser
then takes our answers for that page's; the header Host alone still has the foreign name."""

from __future__ import annotations

import re
from collections.abc import Sequence

OURS = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine that nobody else can give to another one."""
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z_.-]+)(:\d{1,5})?")

RULE = "a request has one header Host, with a name"


def host_name(headers: Sequence[str]) -> str | None:
    """The name in the headers Host of a request, without its port; None unless there is one."""
    found = HOST.fullmatch(headers[0].lower()) if len(headers) == 1 else None
    return None if found is None else found[1].strip("[]")


def not_ours(name: str) -> str:
    """What to answer who calls us by a foreign name."""
    return (
        f"this server does not go by the name of {name}: ask for 127.0.0.1 or localhost, or start "
        f"it with --allow-host {name}"
    )
