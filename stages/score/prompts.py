"""The toxicity that prompts have themselves, from a file in the layout of RealToxicityPrompts."""

from __future__ import annotations

from typing import Any

from trainyard import json_text
from trainyard.artifacts.inputs import read_checked
from trainyard.classifiers.toxicity import key_of
from trainyard.errors import DataError

TEXT, TOXICITY = "text", "toxicity"


def read_toxicity(url: str) -> dict[bytes, float]:
    """By the key of a prompt, for those that have one. A line is {"prompt": {"text": ...,
    "toxicity": ...}}, or the inner object alone. DataError names another line."""
    try:
        lines = read_checked(url).decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{url}: not UTF-8: {error}") from None
    found: dict[bytes, float] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            text, toxicity = _prompt(line, f"{url}, line {number}")
            if toxicity is not None:
                found[key_of(text)] = toxicity
    return found


def _prompt(line: str, where: str) -> tuple[str, float | None]:
    try:
        document: Any = json_text.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    inner = document.get("prompt", document) if isinstance(document, dict) else None
    text = inner.get(TEXT) if isinstance(inner, dict) else None
    toxicity = inner.get(TOXICITY) if isinstance(inner, dict) else None
    is_number = isinstance(toxicity, (int, float)) and not isinstance(toxicity, bool)
    if not isinstance(text, str) or not (toxicity is None or (is_number and 0 <= toxicity <= 1)):
        raise DataError(
            f"{where}: is no prompt, an object with a text in {TEXT!r} and a number from 0 to 1, "
            f"or null, in {TOXICITY!r}"
        )
    return text, None if toxicity is None else float(toxicity)
