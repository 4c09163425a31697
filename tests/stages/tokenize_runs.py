"""What the tests of the tokenize stage share: small corpora of numbers, runs, what they made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stages.tokenize import run as tokenize_run
from stages.tokenize.config import TokenizeConfig
from tests.stages.directly import run_directly
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.provenance.origins import Origin, Provenance

NULL: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 1000}


def tokenize(url: str | Path, prefix: str | Path, **options: Any) -> dict[str, Any]:
    """A run in this process, alone; its metrics."""
    given = {"input": [str(url)], "output_prefix": str(prefix), "workers": 1, **NULL, **options}
    return run_directly(TokenizeConfig, tokenize_run.run, **given)


def command(source: Path | str, prefix: Path | str, *more: str) -> list[str]:
    """The command line, but for --vocab-size."""
    base = [sys.executable, "-m", "stages.tokenize", "--input", str(source)]
    return [*base, "--output-prefix", str(prefix), "--tokenizer-type", "NullTokenizer", *more]


def write(path: Path, *rows: Any) -> Path:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(prefix: str | Path, stem: str = "_text_document") -> Any:
    """The token ids of every sequence of every document."""
    dataset = IndexedDataset(f"{prefix}{stem}")
    return [[s.tolist() for s in doc] for doc in dataset.documents()]


def files(prefix: str | Path, stem: str = "_text_document") -> tuple[bytes, ...]:
    """The contents of .bin, .idx and .docs."""
    return tuple(store.read_bytes(f"{prefix}{stem}{end}") for end in (".bin", ".idx", ".docs"))


def origins(prefix: str | Path, stem: str = "_text_document") -> list[Origin]:
    """Where the documents came from."""
    found = Provenance(f"{prefix}{stem}.docs")
    return [found[k] for k in range(len(found))]


def manifest(prefix: str | Path) -> Manifest:
    """Of a finished run."""
    found = read_manifest(f"{prefix}.manifest.json")
    assert found is not None
    return found[0]


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Documents of 0 to 39 numbers, most with an id."""
    return [
        {
            "text": " ".join(str(j % 999) for j in range(i % 40)),
            **({"id": f"d{i}"} if i % 5 else {}),
        }
        for i in range(first, first + count)
    ]
