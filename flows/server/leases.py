"""Where a server keeps the leases of slots: on disk, as Prefect can by itself; and what ran out
while the server was away is not taken back before its holder could renew it.

Prefect calls a lease over as soon as the server is up again. Its slot went to the next one, beside
the training that had it all the time. Named in PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE."""

from __future__ import annotations

import time
from uuid import UUID

from prefect.server.concurrency.lease_storage import filesystem

from flows.server.ephemeral import LEASE_SECONDS

_began = time.monotonic()
"""The server imports this when it starts."""


class ConcurrencyLeaseStorage(filesystem.ConcurrencyLeaseStorage):
    """Leases on disk, of which none runs out in the first minute of a server."""

    async def read_expired_lease_ids(self, limit: int = 100) -> list[UUID]:
        """Those that may be taken back; `renew_lease` renews every other one, run out or not."""
        if time.monotonic() - _began < LEASE_SECONDS:
            return []
        return await super().read_expired_lease_ids(limit)
