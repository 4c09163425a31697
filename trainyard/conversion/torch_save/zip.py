"""Finds and checks the records of the zip archive that `torch.save` writes.

    NAME/data.pkl   the pickle          NAME/data/0, NAME/data/1, ...   storages
    NAME/version    NAME/byteorder      .data/...                       ignored

torch never compresses records, so each is a range of the file. Any other archive is refused with an
error that names the record."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from trainyard.conversion.ranged_file import RangedFile
from trainyard.errors import ArtifactError

MAX_DIRECTORY_BYTES = 256 * 2**20

END_RECORD = struct.Struct("<4s4H2LH")
END_LOCATOR = struct.Struct("<4sLQL")
END_RECORD_64 = struct.Struct("<4sQ2H2L4Q")
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""The header before a record; the record's name and an extra field follow it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A file of the archive."""

    header: int
    """Offset of its local header."""
    size_bytes: int
    end: int
    """Offset of the next header, or of the directory."""
    crc: int
    """CRC-32 of its bytes, from the directory; 0 if torch was set not to compute it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The records of an archive, by their names below its one folder."""

    url: str
    folder: str
    records: dict[str, Record]

    def begin_of(self, name: str, header: bytes) -> int:
        """Offset of the bytes of a record. header: the first bytes of its local header."""
        record = self.records[name]
        if len(header) < LOCAL_HEADER.size or header[:4] != b"PK\3\4":
            raise ArtifactError(f"{self.url}: record {name!r} has no header; the file is damaged")
        fields = LOCAL_HEADER.unpack(header[: LOCAL_HEADER.size])
        begin: int = record.header + LOCAL_HEADER.size + fields[-2] + fields[-1]
        if begin + record.size_bytes > record.end:
            raise ArtifactError(f"{self.url}: record {name!r} overlaps the one after it")
        return begin


def read_archive(file: BinaryIO, size: int, url: str) -> Archive:
    """The archive in a file of `size` bytes; ArtifactError if torch cannot have written it."""
    directory = _check_directory_size(file, size, url)
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError) as error:
        raise ArtifactError(f"{url}: not a valid zip archive: {error}") from error
    for info in infos:
        reason = _fault(info)
        if reason is not None:
            raise ArtifactError(f"{url}: record {info.filename!r:.100} {reason}")
    folder = _folder_of([info.filename for info in infos], url)
    records = {}
    for info, end in _with_ends(infos, directory):
        if info.header_offset + LOCAL_HEADER.size + info.file_size > end:
            raise ArtifactError(f"{url}: record {info.filename!r} overlaps the one after it")
        name = info.filename.removeprefix(f"{folder}/")
        if name in records:
            raise ArtifactError(f"{url}: has two records {info.filename!r}")
        records[name] = Record(info.header_offset, info.file_size, end, info.CRC)
    return Archive(url, folder, records)


def _with_ends(infos: list[zipfile.ZipInfo], last: int) -> Iterator[tuple[zipfile.ZipInfo, int]]:
    for info, after in pairwise(infos):
        yield info, after.header_offset
    if infos:
        yield infos[-1], last


def _fault(info: zipfile.ZipInfo) -> str | None:
    """Why torch cannot have written a record; None if it can."""
    name = info.filename
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ":" in name or ".." in parts or "" in parts:
        return "has a name that leads out of the archive"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        sizes = f"{info.compress_size} to {info.file_size} bytes"
        return f"is compressed ({sizes}), which torch does not do"
    if info.flag_bits & 1:
        return "is encrypted"
    return None


def _folder_of(names: list[str], url: str) -> str:
    """The folder with the one data.pkl."""
    pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ArtifactError(
            f"{url}: a zip archive with {len(pickles)} data.pkl, not a file of torch.save"
        )
    folder = pickles[0].removesuffix("/data.pkl")
    if any(name.startswith((f"{folder}/code/", f"{folder}/constants.pkl")) for name in names):
        raise ArtifactError(f"{url}: a TorchScript program, not a checkpoint")
    return folder


def _check_directory_size(file: BinaryIO, size: int, url: str) -> int:
    """Offset of the directory at the end. Refuses one that is too large, before it is read."""
    begin = max(0, size - END_RECORD.size - 2**16)
    file.seek(begin)
    tail = file.read(size - begin)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + END_RECORD.size > len(tail):
        raise ArtifactError(f"{url}: has no zip directory at its end; it is truncated")
    fields = END_RECORD.unpack_from(tail, at)
    length, offset = fields[5], fields[6]
    if at >= END_LOCATOR.size and tail[at - END_LOCATOR.size :][:4] == b"PK\6\7":
        place = END_LOCATOR.unpack_from(tail, at - END_LOCATOR.size)[2]
        if place + END_RECORD_64.size > size:
            raise ArtifactError(f"{url}: its zip directory is outside of the file")
        file.seek(place)
        fields_64 = END_RECORD_64.unpack(file.read(END_RECORD_64.size))
        length, offset = fields_64[8], fields_64[9]
    if length > MAX_DIRECTORY_BYTES or offset + length > size:
        raise ArtifactError(f"{url}: a zip directory of {length} bytes; it is damaged or hostile")
    return int(offset)


# --- checksums --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a record in its file."""

    begin: int
    size_bytes: int
    crc: int
    """CRC-32 of all of them; 0 if not known."""


class RecordCheck:
    """Remembers which records of one or more files have passed their checksum."""

    def __init__(self) -> None:
        self._sound: set[tuple[str, int]] = set()

    def read(self, file: RangedFile, span: Span, begin: int, length: int) -> bytearray:
        """A range of a record. begin: offset in the file. Raises ArtifactError if any byte of the
        record has changed since it was written."""
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
                f"{file.url}: the record at byte {span.begin} has CRC-32 {crc:08x}, but was "
                f"written with {span.crc:08x}; the file is damaged, so copy it again"
            )
        self._sound.add(key)
        return data
