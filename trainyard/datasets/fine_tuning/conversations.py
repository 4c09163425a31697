"""Reads instruction data from a file, by number: a record on each line of a .jsonl file, or in the
list of a .json file.

`records` knows what a record may be. The beginnings of lines are found once; a line is read and
checked on access. A list is read whole. Errors name the file, and the line or the record."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import inputs, store
from trainyard.corpus.indexed import map_file
from trainyard.datasets.fine_tuning.records import Record, parse_object, parse_record
from trainyard.errors import DataError

NEWLINE = 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK = 1 << 24
BLANKS = BYTE_ORDER_MARK + b" \t\r\n"
EXCERPT = 60


class ConversationFile:
    """The records of one file: of its lines that are not blank, or of its list.

    A remote file is first copied to the folder `cache`, unless it is there already, or to a
    temporary folder of this object. Takes 16 bytes of memory per line, and pickles as its URL."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        if not url.endswith((".jsonl", ".json")):
            raise DataError(
                f"{url}: conversations must be in uncompressed .jsonl files; unpack or convert it"
            )
        self.url = url
        self._cache = cache
        if cache is None and not store.is_local(url):
            self._temporary = tempfile.TemporaryDirectory(prefix="trainyard-chat-")
            cache = Path(self._temporary.name)
        self._bytes: NDArray[np.uint8] = map_file(inputs.fetch(url, cache or Path()))
        first = self._bytes[:BLOCK].tobytes().lstrip(BLANKS)[:1]
        self._is_list = url.endswith(".json") and first == b"["
        if self._is_list:
            self._bytes = lines_of_list(self._bytes.tobytes(), url)
        self._begins, self._numbers = find_lines(self._bytes)
        if not len(self._begins):
            raise DataError(f"{url} has no lines, so no conversations")

    def __reduce__(self) -> tuple[Callable[..., ConversationFile], tuple[str, Path | None]]:
        return ConversationFile, (self.url, self._cache)

    def __len__(self) -> int:
        """Records."""
        return len(self._begins)

    def where(self, index: int) -> str:
        """File, line and byte of a record, for errors; in a list its number, from 1."""
        begin, number = int(self._begins[index]), int(self._numbers[index])
        if self._is_list:
            return f"{self.url}: record {number}"
        return f"{self.url}: line {number} (byte {begin})"

    def __getitem__(self, index: int) -> Record:
        """The messages of a record, or the record itself if it is a question."""
        begin = int(self._begins[index])
        line = self._line(begin)
        try:
            return parse_record(line)
        except ValueError as fault:
            begins = line[:EXCERPT].decode(errors="backslashreplace")
            raise DataError(f"{self.where(index)}: {fault}; it begins {begins!r}") from None

    def record(self, index: int) -> dict[str, Any]:
        """A record as it is written, of any shape."""
        try:
            return parse_object(self._line(int(self._begins[index])))
        except ValueError as fault:
            raise DataError(f"{self.where(index)}: {fault}") from None

    def _line(self, begin: int) -> bytes:
        step = 1 << 12
        while True:
            piece = self._bytes[begin : begin + step].tobytes()
            end = piece.find(b"\n")
            if end >= 0:
                return piece[:end]
            if len(piece) < step:
                return piece
            step *= 4


def lines_of_list(text: bytes, url: str) -> NDArray[np.uint8]:
    """The records of a list of JSON, each on a line."""
    try:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in json.loads(text)]
    except RecursionError:
        raise DataError(f"{url}: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{url}: not a list of JSON: {error}") from None
    return np.frombuffer("".join(lines).encode(errors="surrogatepass"), np.uint8)


def find_lines(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n,) where each line that is not blank begins, and its number from 1."""
    mark = len(BYTE_ORDER_MARK) if data[:3].tobytes() == BYTE_ORDER_MARK else 0
    ends = [
        start + np.flatnonzero(data[start : start + BLOCK] == NEWLINE)
        for start in range(0, len(data), BLOCK)
    ]
    begins = np.concatenate([np.array([mark], np.int64), *(end + 1 for end in ends)])
    begins = begins[begins < len(data)]
    kept = np.ones(len(begins), bool)
    for line in np.flatnonzero(data[begins] <= ord(" ")).tolist():  # few begin with a blank
        end = begins[line + 1] if line + 1 < len(begins) else len(data)
        kept[line] = bool(data[begins[line] : end].tobytes().strip())
    return begins[kept], 1 + np.flatnonzero(kept)
