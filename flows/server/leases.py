"""Stores the leases of slots for servers that outlive a flow: on disk, with a grace at start.

Prefect alone frees every lease that expired while the server was down, as soon as it is up again.
The slot then goes to another training while the first one still runs. Here the holders first have
a minute to renew their leases. PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE names this module."""

from __future__ import annotations

import time
from uuid import UUID

from prefect.server.concurrency.lease_storage import filesystem

from flows.server.ephemeral import LEASE_SECONDS

_began = time.monotonic()
"""The server imports this when it starts."""


class ConcurrencyLeaseStorage(filesystem.ConcurrencyLeaseStorage):
    """Leases on disk; none expires in the first minute of a server."""

    async def read_expired_lease_ids(self, limit: int = 100) -> list[UUID]:
        """The leases to revoke; `renew_lease` renews all others, expired or not."""
        if time.monotonic() - _began < LEASE_SECONDS:
            return []
        return await super().read_expired_lease_ids(limit)
