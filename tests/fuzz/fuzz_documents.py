"""Any file gives documents, bad lines or a DataError, and any cut of it gives the same."""

from __future__ import annotations

import bz2
import gzip
import lzma

import atheris
from common import fuzz, only, scratch

with atheris.instrument_imports(include=["trainyard.corpus"]):
    from trainyard.corpus import documents  # noqa: F401
    from trainyard.corpus.formats import inputs, jsonl, lines, parse  # noqa: F401

import zstandard

from trainyard.corpus.documents import BadLine, Document, DocumentReader, locate, split_ranges
from trainyard.errors import ArtifactError, ConfigError, DataError

# No Parquet: Arrow, which reads it, ends the whole process over some damaged footers.
ENDINGS = (".jsonl", ".jsonl", ".txt", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz",
           ".txt.bz2", ".txt.gz", ".txt.zst")  # fmt: skip
FOLDER = scratch()


def read(url: str, size: int, unit: int) -> tuple[list[Document], list[BadLine]]:
    found: list[Document] = []
    bad: list[BadLine] = []
    seen = 0
    for source in split_ranges(url, size, unit):
        reader = DocumentReader(source, ("text",), on_bad_line="skip")
        for block in reader.blocks():
            found += [doc._replace(line=doc.line + seen) for doc in block.documents()]
        bad += [one._replace(line=one.line + seen) for one in reader.bad]
        seen += reader.lines
    assert seen >= len(found)
    return found, bad


def target(data: bytes) -> None:
    if len(data) < 2:
        return
    ending = ENDINGS[data[0] % len(ENDINGS)]
    path = FOLDER / f"a{ending}"
    contents = data[2:]
    path.write_bytes(contents)
    with only(DataError, ArtifactError, ConfigError):
        found, bad = read(str(path), len(contents), 1 << 20)
        assert read(str(path), len(contents), 1 + data[1] % 64) == (found, bad)
        for document in found:
            assert document.line >= 1
            assert document.offset >= 0
            "".join(text for texts in document.values for text in texts).encode()
            (document.id or "").encode()
        for one in bad[:2]:
            one.excerpt.encode()
            locate(str(path), one.offset)
        if ending == ".jsonl":
            assert all(contents[d.offset : d.offset + d.length].strip() for d in found)
    with only(DataError, ArtifactError, ConfigError):
        for source in split_ranges(str(path), len(contents), 1 << 20):
            list(DocumentReader(source, ("text", "id")))


LINES = b'{"text": "a", "id": 1}\n\n{"text": ["b", "\\ud83d\\ude00"]}\r\n{"text": NaN}\n["x"]\n{'
PACKED = {
    ".jsonl.gz": gzip.compress(LINES) * 2,
    ".jsonl.zst": zstandard.compress(LINES),
    ".jsonl.xz": lzma.compress(LINES),
    ".txt.bz2": bz2.compress(LINES),
    ".jsonl": LINES,
    ".txt": LINES,
}

if __name__ == "__main__":
    fuzz(target, [bytes([ENDINGS.index(e), 7]) + contents for e, contents in PACKED.items()])
