"""gigatoken as an engine: the ids of a reference library, many times faster.

gigatoken is used if it supports the tokenizer, no known difference applies, and both libraries
agree on the ids of the probe texts. Otherwise the log says why not.
Texts that the libraries may split differently (unicode_mismatch.py) go to the reference.

gigatoken's readers of files and its thread pool are not used."""

from __future__ import annotations

import json
import logging
import os
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from importlib.metadata import version
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainyard.tokenizers.base import (
    Flat,
    as_lists,
    check_unicode,
    encode_apart,
    flatten,
    join_rows,
    replace_rows,
)
from trainyard.tokenizers.fast.probe import probe_texts, refusal, remove_nfc
from trainyard.tokenizers.fast.seams import Seam, encode_in_parts, find_seam, is_long
from trainyard.tokenizers.fast.sentencepiece_model import (
    CONTROL,
    PieceModel,
    refusal_of_pieces,
    tokenizer_json,
)
from trainyard.tokenizers.fast.unicode_mismatch import Suspects

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

log = logging.getLogger(__name__)

Reference = Callable[[Sequence[str]], Sequence[Any]]
"""Returns a list or an array of ids for each text."""

DOUBTFUL_LETTERS = 1 << 14
"""Only the suspect parts of a longer text go to the reference, which is fifty times slower."""

REBUILD_LETTERS = 1 << 25
"""A worker encodes at least this many characters: building one costs as much as encoding 10
million, and its cache of words needs another 20 million to fill."""

REBUILD_GROWTH_BYTES = 192 << 20
"""Growth of the process at which a worker is discarded."""

REBUILD_UNMEASURED_LETTERS = 1 << 29
"""Characters after which a worker is discarded if the size of the process is not known."""


def gigatoken_for(library: Library) -> Gigatoken | None:
    """An engine that makes the ids of a `tokenizers` tokenizer, without the special tokens around a
    text; None if gigatoken cannot."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def reference(texts: Sequence[str]) -> Sequence[Any]:
        if not any(map(is_long, texts)):
            return encode(texts)
        return [encode_in_parts(text, seam, lambda part: encode([part])[0]) for text in texts]

    data = library.to_str().encode()
    document = json.loads(data)
    added = document["added_tokens"]
    seam = find_seam(library)
    reason = refusal(document)
    if reason:
        _not_used(reason)
        return None
    byte_level = not document["model"].get("byte_fallback")
    nfc = remove_nfc(document)
    if nfc:
        data = json.dumps(document).encode()
    texts = probe_texts([token["content"] for token in added])
    return _build(
        lambda gigatoken: gigatoken.Tokenizer.from_json(data),
        reference,
        texts,
        seam,
        byte_level=byte_level,
        nfc=nfc,
    )


def gigatoken_for_pieces(
    model: PieceModel, reference: Reference, apart: re.Pattern[str] | None
) -> Gigatoken | None:
    """An engine that makes the same ids as `reference`, for a SentencePiece model and texts in
    which `apart` is not found; None if gigatoken cannot."""
    reason = refusal_of_pieces(model)
    if reason:
        _not_used(reason)
        return None
    data = tokenizer_json(model)
    texts = probe_texts(model.pieces_of(CONTROL))
    return _build(
        lambda gigatoken: gigatoken.Tokenizer.from_json(data),
        reference,
        [text for text in texts if not (apart and apart.search(text))],
    )


def gigatoken_for_ranks(
    ranks: Sequence[bytes],
    special: dict[str, int],
    scheme: str,
    reference: Reference,
    seam: Seam | None,
) -> Gigatoken | None:
    """An engine for tokens whose ids are their ranks, and special tokens with ids above those; None
    if gigatoken cannot. scheme: gigatoken's name for the pattern that splits text."""
    lines = b"".join(b"%s %d\n" % (b64encode(token), i) for i, token in enumerate(ranks))

    def load(gigatoken: Any) -> Any:
        with NamedTemporaryFile(suffix=".tiktoken") as file:  # gigatoken reads only files
            file.write(lines)
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, scheme, special)

    texts = probe_texts(list(special))
    return _build(load, reference, texts, seam, byte_level=True)


def _build(
    load: Callable[[Any], Any],
    reference: Reference,
    texts: list[str],
    seam: Seam | None = None,
    *,
    byte_level: bool = False,
    nfc: bool = False,
) -> Gigatoken | None:
    """The engine that `load` makes, if it makes the reference's ids for the probe `texts`."""
    try:
        import gigatoken
    except ImportError as error:
        _not_used(str(error))
        return None
    try:
        engine = Gigatoken(lambda: load(gigatoken).backend, reference, seam)
    except BaseException as error:  # the library may raise anything; a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        _not_used(" ".join(str(error).split("Location:")[0].split()))
        return None
    if byte_level:
        # Only byte-level tokenizers split words by classes of characters.
        engine.watch(nfc=nfc)
    expected = reference(texts)
    for text, theirs in zip(texts, expected, strict=True):
        if engine.encode(text) != list(theirs):
            _not_used(f"it makes other ids for {text[:40]!a}")
            return None
    return engine


def _not_used(reason: str) -> None:
    log.warning("encoding with the reference library, which is slower: gigatoken: %s", reason)


class Gigatoken:
    """Encodes in any number of threads at once, each with a separate worker.

    A worker caches every word that it has seen, so it grows without bound. It is discarded when the
    process has grown too much since the worker was made."""

    def __init__(
        self, make: Callable[[], Any], reference: Reference, seam: Seam | None = None
    ) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._make = make
        self._reference = reference
        self._seam = seam
        self._suspects: Suspects | None = None
        self._idle = [_Worker(make())]

    def watch(self, *, nfc: bool) -> None:
        """Leave suspect texts to the reference."""
        self._suspects = Suspects(self._idle[0].backend.vocab, nfc=nfc)

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        if len(text) > DOUBTFUL_LETTERS:
            return as_lists(self.encode_flat([text]))[0]
        found: list[int] = self._encode_one(text).tolist()
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts."""
        return as_lists(self.encode_flat(texts))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        if not texts:
            return flatten([])
        if self._seam is None:
            return self._encode(texts)
        return encode_apart(texts, is_long, self._encode_long, self._encode)

    def _encode_long(self, text: str) -> NDArray[np.uint32]:
        return encode_in_parts(text, self._seam, lambda part: self._encode([part])[0])

    def _encode(self, texts: Sequence[str]) -> Flat:
        worker = self._take()
        ids, bounds = worker.encode_flat(list(texts))
        self._give_back(worker)
        suspects = self._suspects.find(texts, ids, bounds) if self._suspects else []
        if not suspects:
            return ids, bounds
        rows = self._by_reference([texts[i] for i in suspects])
        return replace_rows((ids, bounds), suspects, rows)

    def _by_reference(self, texts: Sequence[str]) -> list[Any]:
        """The ids of suspect texts; the reference gets only the suspect parts of a long one."""
        seam = self._seam
        if seam is None:
            return list(self._reference(texts))
        short = iter(self._reference([t for t in texts if len(t) <= DOUBTFUL_LETTERS]))
        return [
            next(short)
            if len(text) <= DOUBTFUL_LETTERS
            else encode_in_parts(text, seam, self._encode_one, DOUBTFUL_LETTERS)
            for text in texts
        ]

    def _encode_one(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text that is not cut."""
        worker = self._take()
        ids = worker.encode(text)
        self._give_back(worker)
        bounds = np.array([0, len(ids)], np.int64)
        if self._suspects and self._suspects.find([text], ids, bounds):
            return np.asarray(self._reference([text])[0], np.uint32)
        return ids

    def _take(self) -> _Worker:
        try:
            return self._idle.pop()
        except IndexError:
            return _Worker(self._make())

    def _give_back(self, worker: _Worker) -> None:
        if not worker.is_spent():
            self._idle.append(worker)


class _Worker:
    """A tokenizer object of the library, for one thread at a time."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._letters = 0
        self._size_bytes = resident_bytes()

    def encode(self, text: str) -> NDArray[np.uint32]:
        self._letters += len(text)
        ids: NDArray[np.uint32] = self.backend.encode(text.encode())
        return ids

    def encode_flat(self, texts: list[str]) -> Flat:
        self._letters += sum(map(len, texts))
        # One by one: a batch comes as an awkward array, whose import takes 0.2 s.
        try:
            rows = [self.backend.encode(text) for text in texts]
        except TypeError:
            check_unicode(texts)
            raise
        return join_rows(rows)

    def is_spent(self) -> bool:
        if self._letters < REBUILD_LETTERS:
            return False
        size_bytes = resident_bytes()
        if size_bytes is None or self._size_bytes is None:
            return self._letters > REBUILD_UNMEASURED_LETTERS
        return size_bytes - self._size_bytes > REBUILD_GROWTH_BYTES


def resident_bytes() -> int | None:
    """Resident memory of the process; None if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
