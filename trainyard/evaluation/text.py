"""The text of a file to evaluate on."""

from __future__ import annotations

from trainyard.artifacts.inputs import read_checked
from trainyard.errors import DataError


def read_text(url: str) -> str:
    """A UTF-8 file with newlines as line ends. Raises DataError with the first byte that is not
    UTF-8."""
    data = read_checked(url)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{url}: byte {error.start} is not UTF-8; --valid-data takes a text file"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
