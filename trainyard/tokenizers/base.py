"""The interface of every tokenizer, and the file that lets a checkpoint rebuild one.

Imports no library that encodes: the module of each type does that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked
from trainyard.config import digest_relevant
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.carried import FORMAT_VERSION
from trainyard.tokenizers.config import TokenizerConfig

Flat = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""(ids, bounds): the ids of several texts, concatenated. Text i is ids[bounds[i]:bounds[i+1]];
bounds[0] is 0 and the last bound is the number of ids."""

Ids = Sequence[int] | NDArray[np.uint32]
"""The ids of one text."""


class Tokenizer(Protocol):
    """Encodes text to ids, and decodes ids to text."""

    @property
    def config(self) -> TokenizerConfig:
        """The options it was built from."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included, before any padding of the embedding."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def pad(self) -> int | None:
        """Id that pads a row, or None."""

    @property
    def engine(self) -> str:
        """Name and version of the library that encodes, such as "gigatoken 0.10.0"."""

    @property
    def releases_gil(self) -> bool:
        """Whether two threads of one process can encode at the same time."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays, the fastest way; safe from any number of threads."""

    def encode_reference(self, text: str) -> list[int]:
        """The ids of a text by the library that defines the type, built on first use."""

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array, without a list of that size: for documents of any length."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""

    def files(self) -> dict[str, bytes]:
        """Name and contents of every file that `load_tokenizer` needs to rebuild the tokenizer."""


def flatten(lists: Iterable[Sequence[int]]) -> Flat:
    """Lists of ids as arrays."""
    rows = lists if isinstance(lists, list) else list(lists)
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=bounds[1:])
    return np.fromiter(chain.from_iterable(rows), np.uint32, int(bounds[-1])), bounds


def join_rows(rows: Sequence[NDArray[np.uint32]]) -> Flat:
    """The ids of several texts from an array for each."""
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=bounds[1:])
    return np.concatenate([np.zeros(0, np.uint32), *rows]), bounds


def replace_rows(flat: Flat, numbers: Sequence[int], rows: Sequence[Ids]) -> Flat:
    """A copy of `flat` with other ids for some rows. numbers: of those rows, ascending."""
    ids, bounds = flat
    lengths = np.diff(bounds)
    pieces, done = [], 0
    for number, row in zip(numbers, rows, strict=True):
        pieces += [ids[done : bounds[number]], np.asarray(row, np.uint32)]
        done = int(bounds[number + 1])
        lengths[number] = len(row)
    joined = np.concatenate([*pieces, ids[done:]])
    return joined, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def encode_apart(
    texts: Sequence[str],
    is_apart: Callable[[str], object],
    encode: Callable[[str], Ids],
    encode_flat: Callable[[Sequence[str]], Flat],
) -> Flat:
    """The ids of several texts: by `encode` for those that `is_apart`, by `encode_flat` for the
    others."""
    numbers = [i for i, text in enumerate(texts) if is_apart(text)]
    if not numbers:
        return encode_flat(texts)
    found = set(numbers)
    flat = encode_flat(["" if i in found else text for i, text in enumerate(texts)])
    return replace_rows(flat, numbers, [encode(texts[i]) for i in numbers])


def as_lists(flat: Flat) -> list[list[int]]:
    """The reverse of `flatten`."""
    ids, bounds = flat
    ends = bounds.tolist()
    whole: list[int] = ids.tolist()
    return [whole[a:b] for a, b in pairwise(ends)]


def check_unicode(texts: Iterable[str]) -> None:
    """Raise UnicodeEncodeError for a lone surrogate, as the libraries raise unclear errors."""
    for text in texts:
        text.encode()


def description(config: TokenizerConfig) -> bytes:
    """Contents of the file `DESCRIPTION`: every option that affects ids, and no path, so that it
    does not depend on the machine."""
    document = {"format_version": FORMAT_VERSION} | digest_relevant(config)
    return json.dumps(document, indent=1).encode() + b"\n"


def check_vocab_size(config: TokenizerConfig, found: int) -> None:
    """Refuse a `--vocab-size` that is not the one the files have."""
    if config.vocab_size not in (None, found):
        raise ConfigError(
            f"--vocab-size {config.vocab_size}, but {config.tokenizer_type} has {found} ids; "
            "leave the option out"
        )


def read_part(flag: str, url: str, what: str) -> bytes:
    """The contents of a file that an option names; ArtifactError names the option, or says that the
    file is not the one in its manifest."""
    if not store.exists(url):
        raise ArtifactError(f"{flag}: no {what} at {url}; give the path or URL of a file")
    return read_checked(url)
