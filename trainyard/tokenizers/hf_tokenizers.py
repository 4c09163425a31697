"""Wraps a tokenizer of the Hugging Face `tokenizers` library in our protocol.

The library is the reference; gigatoken encodes instead if it makes the same ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Library

from trainyard.errors import ArtifactError
from trainyard.tokenizers.base import (
    Flat,
    as_lists,
    check_unicode,
    check_vocab_size,
    description,
    encode_apart,
    flatten,
)
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.gigatoken import Gigatoken, gigatoken_for
from trainyard.tokenizers.fast.seams import encode_in_parts, find_seam, is_long

MODEL = "tokenizer.json"

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name the special tokens, the preferred one first."""

MAX_IDS = 2**31
"""Ids of token files are int32."""

MAX_GROWTH = 100

ROLES = ("bos", "eos", "unk", "cls", "sep", "mask")
"""Special tokens besides the end of document and the pad, by their names in settings."""


class EngineTokenizer:
    """Any tokenizer of the library, with its files and special ids.

    around: whether to add the special tokens that its post-processor puts around a text."""

    def __init__(
        self,
        config: TokenizerConfig,
        library: Library,
        files: dict[str, bytes],
        eod: int,
        pad: int | None,
        *,
        around: bool = True,
    ) -> None:
        self.config = config
        self.library = library
        self.eod = eod
        self.pad = pad
        self._files = files
        self._around = around
        check_growth(library)
        library.no_truncation()  # a file may contain a model's limits; documents are never cut
        library.no_padding()
        add_special_tokens(library, config.tokenizer_special_tokens)
        self.vocab_size = count_ids(library)
        if self.vocab_size > MAX_IDS:
            raise ArtifactError(
                f"{config.tokenizer_model or MODEL}: its highest id is {self.vocab_size - 1}, and "
                f"token files hold ids below {MAX_IDS}"
            )
        check_vocab_size(config, self.vocab_size)
        self._gigatoken: Gigatoken | None = None
        with library_errors(config.tokenizer_model or MODEL):
            frame = tokens_around(library) if around else ((), ())
        self._prefix, self._suffix = frame or ((), ())
        # A post-processor that does more than add tokens around a text needs all of it.
        self._seam = find_seam(library) if frame is not None else None
        # gigatoken supports only BPE; other models use the library without a warning.
        if config.use_gigatoken and frame is not None and type(library.model).__name__ == "BPE":
            self._gigatoken = gigatoken_for(library)
        self.releases_gil = self._gigatoken is None
        self._find_named()

    def _find_named(self) -> None:
        """Hook for subclasses that look up more special tokens by name."""

    @property
    def engine(self) -> str:
        """Name and version of the library that encodes."""
        return self._gigatoken.name if self._gigatoken else f"tokenizers {tokenizers.__version__}"

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._gigatoken is None:
            return self.encode_reference(text)
        return [*self._prefix, *self._gigatoken.encode(text), *self._suffix]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""
        if self._gigatoken is None:
            return self._encode_lists(texts)
        return as_lists(self.encode_flat(texts))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        if self._gigatoken is None:
            if self._seam is None:
                return flatten(self._encode_lists(texts))
            return encode_apart(
                texts, is_long, self.reference_array, lambda t: flatten(self._encode_lists(t))
            )
        return surround(self._gigatoken.encode_flat(texts), self._prefix, self._suffix)

    def encode_reference(self, text: str) -> list[int]:
        """The ids of a text by the library itself."""
        if self._seam and is_long(text):
            parted: list[int] = self.reference_array(text).tolist()
            return parted
        try:
            with library_errors(self.config.tokenizer_model or MODEL):
                ids: list[int] = self.library.encode(text, add_special_tokens=self._around).ids
        except TypeError:
            check_unicode([text])
            raise
        return ids

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array; a long text is encoded in parts if it can be cut."""
        if self._seam is None or not is_long(text):
            return np.array(self.encode_reference(text), np.uint32)
        ids = encode_in_parts(text, self._seam, lambda part: self._by_library([part], False)[0])
        return surround((ids, np.array([0, len(ids)])), self._prefix, self._suffix)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        try:  # no context manager, as a server decodes at each token
            text: str = self.library.decode(list(ids), skip_special_tokens=False)
        except BaseException:
            with library_errors(self.config.tokenizer_model or MODEL):
                raise
        return text

    def files(self) -> dict[str, bytes]:
        """The files that `load_tokenizer` needs; transformers can load their folder too."""
        files = self._files | {DESCRIPTION: description(self.config)}
        if MODEL not in files:  # it was built here, not read from a file
            files[MODEL] = self.library.to_str(pretty=False).encode()
        return files

    def _encode_lists(self, texts: Sequence[str]) -> list[list[int]]:
        return self._by_library(texts, self._around)

    def _by_library(self, texts: Sequence[str], around: bool) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(texts, around)]

    def _encodings(self, texts: Sequence[str], around: bool) -> list[Encoding]:
        try:
            with library_errors(self.config.tokenizer_model or MODEL):
                encodings: list[Encoding] = self.library.encode_batch_fast(
                    list(texts), add_special_tokens=around
                )
        except TypeError:
            check_unicode(texts)
            raise
        return encodings


class NamingTokenizer(EngineTokenizer):
    """An EngineTokenizer whose files name its special tokens (`SETTINGS`).

    bos, eos, unk, cls, sep, mask: their ids, None if it has none."""

    def _find_named(self) -> None:
        files = self._files
        settings = [read_settings(files[name], name) for name in SETTINGS if name in files]
        ids = (find_id(self.library, named_token(settings, f"{role}_token")) for role in ROLES)
        self.bos, self.eos, self.unk, self.cls, self.sep, self.mask = ids


def read_settings(data: bytes, name: str) -> dict[str, Any]:
    """The contents of one of `SETTINGS`; empty for a JSON document that is not an object."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name} is not a JSON document: {error}") from None
    return document if isinstance(document, dict) else {}


def named_token(settings: Iterable[Mapping[str, Any]], role: str) -> str | None:
    """The token of a role, such as bos_token, in the first settings that name one."""
    for document in settings:
        token = document.get(role)
        if isinstance(token, dict):  # an AddedToken written out
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def find_id(library: Library, token: str | None) -> int | None:
    """The id of a token; None if the vocabulary does not have it."""
    found: int | None = None if token is None else library.token_to_id(token)
    return found


def parse_library(data: bytes, name: str) -> Library:
    """The tokenizer of a tokenizer.json. Raises ArtifactError if it is not one."""
    try:
        with library_errors(name):
            return Library.from_str(data.decode())
    except (ArtifactError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix(f"{name}: ")
        raise ArtifactError(f"{name}: not a readable tokenizer.json: {reason}") from None


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Turn what the library raises for a file that it cannot work with into ArtifactError.

    It raises plain Exception, and for a defect of its own a PanicException, which is none."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{name}: {error}") from None


def check_growth(library: Library) -> None:
    """Refuse replacements that make a text many times as long, each of what the one before made."""
    for part in (library.normalizer, library.decoder):
        step = {} if part is None else json.loads(part.__getstate__())
        if (growth := _growth(step)) > MAX_GROWTH:
            raise ArtifactError(
                f"{MODEL}: its replacements make a text up to {growth:.3g} times as long; at most "
                f"{MAX_GROWTH} is allowed"
            )


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long a text becomes by the replacements of a step and those in it."""
    within = step.get("normalizers") or step.get("decoders") or ()
    growth = math.prod(map(_growth, within))
    if step.get("type") == "Replace":
        literal = step["pattern"].get("String")
        growth *= max(1.0, len(step["content"]) / max(1, len(literal or "")))
    return growth


def add_special_tokens(library: Library, tokens: Sequence[str]) -> None:
    """Add special tokens, which are found anywhere in a text; existing ones stay."""
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])


def count_ids(library: Library) -> int:
    """One above the highest id. With gaps in the ids, this is more than the number of tokens."""
    vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
    return max(len(vocab), 1 + max(vocab.values(), default=-1))


def tokens_around(library: Library) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that the post-processor puts before and after a text; None if it does more."""
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    for text in ("a b", "", "c"):
        bare = tuple(library.encode(text, add_special_tokens=False).ids)
        dressed = tuple(library.encode(text).ids)
        if text == "a b":
            starts = range(len(dressed) - len(bare) + 1)
            start = next((k for k in starts if dressed[k : k + len(bare)] == bare), 0)
            prefix, suffix = dressed[:start], dressed[start + len(bare) :]
        if dressed != (*prefix, *bare, *suffix):
            return None
    return prefix, suffix


def surround(flat: Flat, prefix: Sequence[int], suffix: Sequence[int]) -> Flat:
    """A copy of `flat` with the prefix before and the suffix after every row."""
    if not prefix and not suffix:
        return flat
    ids, bounds = flat
    longer = bounds + (len(prefix) + len(suffix)) * np.arange(len(bounds))
    added = np.zeros(int(longer[-1]), np.bool_)
    out = np.empty(len(added), np.uint32)
    for places, token in (
        *((longer[:-1] + k, token) for k, token in enumerate(prefix)),
        *((longer[1:] - len(suffix) + k, token) for k, token in enumerate(suffix)),
    ):
        added[places] = True
        out[places] = token
    out[~added] = ids
    return out, longer
