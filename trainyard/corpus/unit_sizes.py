"""How large a unit of work is; see `trainyard.corpus.units`."""

from __future__ import annotations

from trainyard.artifacts.block_digest import BLOCK_BYTES

UNIT_BYTES = 8 << 20
"""Input that a unit reads: what a kill can cost a worker, a fraction of a second."""

MAX_UNITS = 4096
"""Units of a large input grow instead of becoming more: each costs some calls of the store."""

UNITS_A_RANK = 16
"""At least, of a large input: ranks that have nearly as much to do end at nearly the same time."""

MOST_BYTES_OF_RANKS = 32 << 20
"""Of a unit of a share: 512 MB in 16 workers is what a kill of a task can cost."""

LOOKING_AT_ONCE = 16
"""Files whose sizes are asked for at the same time: each may be a question to a far store."""


def unit_bytes_for(
    total_bytes: int, least_bytes: int | None = None, world_size: int | None = None
) -> int:
    """Bytes of a unit: it grows with the input, and shrinks with the ranks that make shares, if
    there are any. least_bytes: instead of UNIT_BYTES."""
    if world_size is None:
        grown = -(-total_bytes // MAX_UNITS)
    else:
        wanted = max(MAX_UNITS, UNITS_A_RANK * world_size)
        grown = min(-(-total_bytes // wanted), MOST_BYTES_OF_RANKS)
    least = least_bytes or UNIT_BYTES
    return least if grown <= least else -(-grown // BLOCK_BYTES) * BLOCK_BYTES
