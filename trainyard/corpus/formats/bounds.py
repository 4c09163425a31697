"""Bounds the size of a document: memory grows with the largest one, and a compressed file of a few
kilobytes may contain a line of any length. Standard library only."""

from __future__ import annotations

from trainyard.errors import ConfigError

MAX_DOCUMENT_BYTES = 256 << 20

MOST_BYTES = 1 << 31
"""Largest --max-document-bytes: a document must fit in memory several times."""


def check_bound(max_document_bytes: int) -> None:
    """Refuse a --max-document-bytes that is not positive or too large for memory."""
    if not 0 < max_document_bytes <= MOST_BYTES:
        raise ConfigError(
            f"--max-document-bytes must be from 1 to {MOST_BYTES}, got {max_document_bytes}"
        )


def too_large(max_bytes: int, what: str = "the line") -> str:
    """The message for a document that is too large. what: the part with the size."""
    return (
        f"{what} has more than {max_bytes} bytes, the limit of --max-document-bytes; split it into "
        "several documents, or raise the limit"
    )
