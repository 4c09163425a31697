"""Small local files that several programs write: notes, records, caches."""

from __future__ import annotations

import uuid
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new contents, whole or not at all, whenever this program is killed.

    Of several programs that do so at once, the last one wins. Raises OSError."""
    # A process id is not unique: each container has a process 7.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
