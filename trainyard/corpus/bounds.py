"""How large a document may be: memory is bounded by the largest one, and a compressed file of a few
kilobytes may hold a line of any length. Standard library only."""

from __future__ import annotations

from trainyard.errors import ConfigError

MAX_DOCUMENT_BYTES = 256 << 20

MOST_BYTES = 1 << 31
"""That the bound can be raised to: a document has to fit in memory several times."""


def check_bound(max_document_bytes: int) -> None:
    """Refuse a --max-document-bytes that no document fits, or that no memory does."""
    if not 0 < max_document_bytes <= MOST_BYTES:
        raise ConfigError(
            f"--max-document-bytes must be from 1 to {MOST_BYTES}, got {max_document_bytes}"
        )


def too_large(max_bytes: int, what: str = "the line") -> str:
    """Why a document is refused, and what to do."""
    return (
        f"{what} has more than {max_bytes} bytes, the bound of --max-document-bytes; cut it into "
        "several documents, or raise the bound"
    )
