"""What tests of the stages from documents to documents share."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord

TEXT = "the yard opens before dawn and every train that has come is sorted with care by then"
WORDS = TEXT.split()


def prose(seed: int, num_words: int = 60) -> str:
    """Sentences that differ from those of another seed."""
    words = [WORDS[zlib.crc32(f"{seed} {i}".encode()) % len(WORDS)] for i in range(num_words)]
    words = [f"{word}{seed}" if i % 5 == 0 else word for i, word in enumerate(words)]
    return (
        ". ".join(" ".join(words[i : i + 10]).capitalize() for i in range(0, len(words), 10)) + "."
    )


def write(path: Path, rows: Iterable[Any]) -> Path:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def forge(folder: Path, name: str, data: bytes) -> None:
    """Change a file of an output and its record in the manifest, as somebody who knows how."""
    (folder / name).write_bytes(data)
    found = read_manifest(str(folder / MANIFEST))
    assert found is not None
    now = FileRecord(name, len(data), digest_bytes(data))
    files = tuple(now if one.path == name else one for one in found[0].files)
    document = replace(found[0], files=files).to_document()
    (folder / MANIFEST).write_text(json.dumps(document))


def rows(folder: str | Path, kind: str) -> list[dict[str, Any]]:
    """The documents of all files of a kind, in order."""
    names = sorted(n for n in store.list_files(str(folder)) if n.startswith(kind))
    data = b"".join(store.read_bytes(store.join(str(folder), name)) for name in names)
    return [json.loads(line) for line in data.splitlines()]


def contents(folder: str | Path) -> dict[str, bytes]:
    """The files of an output that any run of it has."""
    names = [n for n in store.list_files(str(folder)) if n.endswith((".jsonl", "report.json"))]
    return {name: store.read_bytes(store.join(str(folder), name)) for name in sorted(names)}


def origin(row: dict[str, Any]) -> tuple[str, int]:
    """Where a document came from."""
    return row["origin"]["file"], row["origin"]["offset"]


def report(folder: str | Path) -> Any:
    """The report of a run."""
    return store.read_json(store.join(str(folder), "report.json"))
