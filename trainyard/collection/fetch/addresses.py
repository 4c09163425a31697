"""Which addresses a page may be fetched from.

What is checked is the address that is connected to: a name may resolve to something else the next
time (DNS rebinding)."""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from trainyard.artifacts.backends.web_access import is_refused, parsed_address


class AddressError(Exception):
    """A host that nothing may be fetched from."""


def check_address(text: str, allow_private: bool) -> None:
    """AddressError for an address that is not public, unless allowed; always for one of a metadata
    service. A name passes: its addresses are checked when it is resolved."""
    address = parsed_address(text)
    if address is None:
        return
    if is_refused(text):
        raise AddressError(f"{text} is link-local or a metadata service")
    is_public = address.is_global and not address.is_multicast
    if not is_public and not allow_private:
        raise AddressError(f"{text} is no public address; --allow-private-addresses allows it")


class CheckedResolver(AbstractResolver):
    """Resolves names to addresses that may be connected to; the connection goes to these alone."""

    def __init__(self, allow_private: bool, resolver: AbstractResolver | None = None) -> None:
        self._allow_private = allow_private
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a host; AddressError if one of them must not be connected to."""
        found = await self._resolver.resolve(host, port, family)
        for one in found:
            check_address(one["host"], self._allow_private)
        return found

    async def close(self) -> None:
        """Release what it holds."""
        await self._resolver.close()
