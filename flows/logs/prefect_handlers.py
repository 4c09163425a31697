"""Keeps Prefect's log handlers of a flow run from ending it or losing lines.

- A flow run that a worker started writes to the worker's pipe. If the worker is killed, the first
  line after that would raise SystemExit, wherever in the flow it is logged (rich's default).
- Lines that Prefect could not send to its server after some tries are dropped. Here they wait until
  the server can be reached again, or the flow ends."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httpx
from prefect.logging.handlers import APILogWorker
from rich.console import Console

AGAIN_SECONDS = 1.0
"""After a try in which the server could not be reached; Prefect's client has tried for a minute."""

log = logging.getLogger(__name__)


def keep_lines() -> None:
    """Change the handlers of this program."""
    setattr(Console, "on_broken_pipe", _mute)  # noqa: B010  (mypy refuses an assignment)
    setattr(APILogWorker, "_handle_batch", _send)  # noqa: B010


def _mute(console: Console) -> None:
    console.quiet = True


async def _send(worker: Any, lines: list[dict[str, Any]]) -> None:
    """Send lines to the server: again and again, but once if the program ends."""
    while True:
        try:
            await worker._client.create_logs(lines)
            return
        except Exception as error:
            if worker._stopped or not _is_unavailable(error):
                log.debug("%d lines did not reach Prefect's server: %s", len(lines), error)
                return
        await asyncio.sleep(AGAIN_SECONDS)


def _is_unavailable(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError)
