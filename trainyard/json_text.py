"""JSON that others wrote: every fault of a document is a ValueError.

`json.loads` raises RecursionError for a thousand brackets, which no caller expects."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """The document in a text. Raises JSONDecodeError, or another ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
