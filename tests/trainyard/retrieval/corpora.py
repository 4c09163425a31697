"""Small corpora of bytes as tokens, a BERT vocabulary of letters, and chunk databases of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from stages.retro_db.config import RetroDbConfig
from stages.retro_db.run import run
from tests.stages.directly import run_directly
from tests.trainyard.corpus.token_files import write_tokens
from trainyard.tokenizers.wordpiece import SPECIAL

EOD = 0
"""Of ByteLevelTokenizer, whose other ids are bytes."""

LENGTH = 8
"""Tokens of a chunk here."""

ENGLISH = [
    "the yard shunts every train of words",
    "",
    "onto the right track",
    "x",
    "a" * 16,
    "of words" + " " * LENGTH + "and more words",
    "before dawn the night train leaves",
    "the last document of all",
]
GERMAN = ["der zug kommt", "  \n ", "aus dem tunnel, und steht", "am gleis", "elf"]


def write_vocabulary(folder: Path) -> str:
    """A vocab.txt of letters."""
    path = folder / "vocab.txt"
    letters = "abcdefghijklmnopqrstuvwxyz,"
    path.write_text("\n".join([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]) + "\n")
    return str(path)


def write_corpus(prefix: Path | str, texts: Sequence[str]) -> str:
    """Token files of these texts; only the empty text has no end of document."""
    return write_tokens(prefix, [[[*text.encode(), EOD]] if text else [] for text in texts])


def write_two(folder: Path) -> list[str]:
    """Prefixes of an English and a German corpus."""
    return [write_corpus(folder / name, texts) for name, texts in (("en", ENGLISH), ("de", GERMAN))]


def options(folder: Path, data_path: Sequence[str], **more: Any) -> dict[str, Any]:
    """Options that make a database of some corpora in FOLDER/db."""
    return {
        "data_path": list(data_path),
        "output_dir": str(folder / "db"),
        "tokenizer_type": "ByteLevelTokenizer",
        "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
        "retro_bert_vocab_file": write_vocabulary(folder),
        "retro_gpt_chunk_length": LENGTH,
        "retro_gpt_split": "75,25,0",
        "retro_index_ntrain": 8,
        "workers": 1,
        **more,
    }


def build(folder: Path, data_path: Sequence[str], **more: Any) -> dict[str, Any]:
    """Make a database in this process; returns the metrics."""
    return run_directly(RetroDbConfig, run, **options(folder, data_path, **more))


def arrays(path: Path) -> dict[str, NDArray[np.int64]]:
    """Every array of an HDF5 file."""
    with h5py.File(path, "r") as file:
        return {name: values[()].astype(np.int64) for name, values in file.items()}


def merged(folder: Path, kind: str) -> NDArray[np.int64]:
    """The chunks of a merged database."""
    return arrays(folder / "db" / "merged" / f"{kind}.hdf5")["chunks"]
