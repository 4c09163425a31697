"""Tokens of texts, without holding up the event loop for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from trainyard.serving.errors import bad_request
from trainyard.serving.outputs import ServedModel

LONG_CHARS = 20_000
"""From here on a text is encoded in a thread."""


async def encoded(
    encode: Callable[..., list[int]], served: ServedModel, text: str, **options: Any
) -> list[int]:
    """`encode(tokenizer, text, **options)`; RequestError for a text that is no Unicode."""
    try:
        if len(text) < LONG_CHARS:
            return encode(served.tokenizer, text, **options)
        return await asyncio.to_thread(encode, served.tokenizer, text, **options)
    except UnicodeEncodeError:
        raise bad_request("a text has half of a surrogate pair, which is no character") from None
