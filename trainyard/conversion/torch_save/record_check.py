"""The CRC-32 that an archive keeps of each of its records, compared when any of it is read.

A record may be a whole buffer of which many tensors are parts. It is compared once, whichever part
is asked for first; one that is read whole is not read a second time for it. torch writes 0 where it
was told not to compute any (`torch.serialization.set_crc32_options`): then nothing is compared."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.conversion.ranged_file import RangedFile
from trainyard.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a record in its file."""

    begin: int
    size_bytes: int
    crc: int
    """Of all of them; 0: not known."""


class RecordCheck:
    """Which records of a file, or of several, were found to be what was written."""

    def __init__(self) -> None:
        self._sound: set[tuple[str, int]] = set()

    def read(self, file: RangedFile, span: Span, begin: int, length: int) -> bytearray:
        """A range of a record, counted in the file. Raises ArtifactError where any byte of the
        record is not what was written."""
        key = file.url, span.begin
        if not span.crc or key in self._sound:
            return file.range(begin, length)
        if (begin, length) == (span.begin, span.size_bytes):
            data, crc = file.range_and_crc(begin, length)
        else:
            crc = file.crc(span.begin, span.size_bytes)
            data = file.range(begin, length)
        if crc != span.crc:
            raise ArtifactError(
                f"{file.url}: the record at byte {span.begin} has CRC-32 {crc:08x}, and was "
                f"written with {span.crc:08x}; the file is damaged, so copy it anew"
            )
        self._sound.add(key)
        return data
