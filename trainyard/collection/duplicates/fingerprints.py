"""Fingerprints: what has to be known of the documents of a unit to find duplicates.

A file of fingerprints is an .npz without pickles; its arrays are the fields below."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from trainyard.collection.documents import Item, as_line
from trainyard.collection.duplicates.minhash import Array, MinHash, Shingler, digests, one_blank
from trainyard.corpus.formats.records import ORIGIN
from trainyard.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """n documents, m lines."""

    texts: Array
    """(n, 2) u64 digests of the normalized texts."""
    records: Array
    """(n, 2) u64 digests of the documents with all keys but the origin: what order is by."""
    sizes: Array
    """(n,) i64 characters of the text."""
    bands: Array
    """(n, b) u64 keys of the bands; b is 0 where near duplicates are not looked for."""
    shingle_ends: Array
    """(n,) i64 ends of each document's part of `shingles`."""
    shingles: Array
    """u32, ascending in each document."""
    lines: Array
    """(m, 2) u64 digests of lines, of paragraphs, or of runs of words."""
    line_documents: Array
    """(m,) i64 the document of each."""
    line_numbers: Array
    """(m,) i64 which line of the document each is; of a run its first word."""
    names: Array
    """u8: JSON [file, offset, id] of each document."""
    name_ends: Array
    """(n,) i64 ends of each document's part of `names`."""

    def pack(self) -> bytes:
        """The file."""
        out = io.BytesIO()
        np.savez(out, **{one.name: getattr(self, one.name) for one in fields(self)})
        return out.getvalue()

    @staticmethod
    def parse(data: bytes, where: str) -> Fingerprints:
        """From the file; ArtifactError for a damaged one."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                return Fingerprints(**{one.name: arrays[one.name] for one in fields(Fingerprints)})
        except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
            raise ArtifactError(
                f"{where}: not a file of fingerprints ({error}); remove it and run again"
            ) from error


@dataclass(slots=True)
class Fingerprinter:
    """Takes documents in order."""

    key: str
    normalize: Callable[[str], str]
    shingler: Shingler | None
    minhash: MinHash
    split: Callable[[str], Iterable[tuple[int, str]]] | None
    """The lines of a text to compare, or other parts of it, with their numbers; None: nothing is
    compared."""
    _texts: list[bytes] = field(default_factory=list)
    _records: list[bytes] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _signatures: list[Array] = field(default_factory=list)
    _bands: list[Array] = field(default_factory=list)
    _shingles: list[Array] = field(default_factory=list)
    _lines: list[bytes] = field(default_factory=list)
    _places: list[tuple[int, int]] = field(default_factory=list)
    _names: list[bytes] = field(default_factory=list)
    _digested: list[tuple[Array, Array, Array]] = field(default_factory=list)

    BATCH = 1024

    def add(self, item: Item) -> None:
        """One document."""
        text = str(item.fields[self.key])
        plain = self._plain(text)
        number = len(self._sizes)
        self._texts.append(plain.encode(errors="surrogatepass"))
        rest = {name: value for name, value in item.fields.items() if name != ORIGIN}
        self._records.append(as_line(rest))
        self._sizes.append(len(text))
        self._names.append(as_line([item.place.file, item.place.offset, item.fields.get("id")]))
        if self.shingler is not None:
            self._add_signature(self.shingler(plain))
        for at, line in self.split(text) if self.split is not None else ():
            self._lines.append(self._plain(line).encode(errors="surrogatepass"))
            self._places.append((number, at))
        if len(self._texts) >= self.BATCH:
            self._digest()

    def _plain(self, text: str) -> str:
        """What is compared of a text; one without words, such as a row of signs, stays as it is."""
        return self.normalize(text) or one_blank(text)

    def _add_signature(self, shingles: Array) -> None:
        if not len(shingles):
            shingles = np.zeros(1, np.uint32)  # empty texts are alike
        self._shingles.append(shingles)
        self._signatures.append(self.minhash.signature(shingles))

    def _digest(self) -> None:
        """Replace texts by their digests, so that not all are in memory."""
        self._digested.append((digests(self._texts), digests(self._records), digests(self._lines)))
        for texts in (self._texts, self._records, self._lines):
            texts.clear()
        if self._signatures:
            self._bands.append(self.minhash.band_keys(np.stack(self._signatures)))
            self._signatures.clear()

    def finish(self) -> Fingerprints:
        """Of all documents so far."""
        self._digest()
        texts, records, lines = (
            np.concatenate(parts) for parts in zip(*self._digested, strict=True)
        )
        places = np.array(self._places, np.int64).reshape(-1, 2)
        no_bands = np.zeros((len(texts), 0), np.uint64)
        shingles = [np.empty(0, np.uint32), *self._shingles]
        return Fingerprints(
            texts,
            records,
            np.array(self._sizes, np.int64),
            np.concatenate(self._bands) if self._bands else no_bands,
            np.cumsum([len(one) for one in self._shingles], dtype=np.int64),
            np.concatenate(shingles),
            lines,
            places[:, 0],
            places[:, 1],
            np.frombuffer(b"".join(self._names), np.uint8),
            np.cumsum([len(one) for one in self._names], dtype=np.int64),
        )
