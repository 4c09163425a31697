"""Small token files for tests: their bytes, or both halves under a prefix of any store."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.artifacts import store
from trainyard.corpus.indexed import IndexedWriter

Documents = list[list[list[int]]]


def token_bytes(
    docs: Sequence[Any], dtype: Any = np.uint16, modes: Any = None
) -> tuple[bytes, bytes]:
    """The .bin and the .idx of documents, which are lists of sequences."""
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    writer = IndexedWriter(bin_file, dtype, multimodal=modes is not None)
    for i, doc in enumerate(docs):
        writer.add_document(doc, None if modes is None else modes[i])
    writer.write_index(idx_file)
    return bin_file.getvalue(), idx_file.getvalue()


def put_tokens(prefix: Path | str, data: tuple[bytes, bytes]) -> str:
    """Write both halves; returns the prefix."""
    store.write_bytes(f"{prefix}.bin", data[0])
    store.write_bytes(f"{prefix}.idx", data[1])
    return str(prefix)


def write_tokens(prefix: Path | str, docs: Sequence[Any], dtype: Any = np.uint16) -> str:
    """Write the pair of some documents; returns the prefix."""
    return put_tokens(prefix, token_bytes(docs, dtype))
