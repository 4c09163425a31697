"""A client that hangs up before its answer is ready: nothing is computed for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818  # nothing is wrong
    """The client has closed the connection."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns or raises. If the client goes first, `work` is cancelled and ClientGone
    raised. The body of the request has been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
