"""What is said of a registry of images that cannot be reached; any other reason why an image is not
pulled is about what was asked for. Pure."""

from __future__ import annotations

import re

AWAY = re.compile(
    r"time-?out|deadline exceeded|connection (refused|reset)|no such host|EOF\b|"
    r"temporar|TLS handshake|toomanyrequests|too many requests|\b50[0234]\b",
    re.IGNORECASE,
)


def is_away(message: str) -> bool:
    """True where the registry, or the way to it, is at fault: it may go well later."""
    return AWAY.search(message) is not None
