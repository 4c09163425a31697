"""Fill-in-the-middle samples: texts whose middle comes last (arXiv:2207.14255).

    text    prefix middle suffix
    PSM     <fim_prefix> prefix <fim_suffix> suffix <fim_middle> middle
    SPM     <fim_prefix> <fim_suffix> suffix <fim_middle> prefix middle

Each text of a sample, from one end of a document to the next, is detokenised, cut at two characters
and tokenised again, as in Megatron-LM. Differences from it:
- Each sample has a separate generator, seeded by the run's seed and the number of the sample.
  Megatron-LM uses one generator for all, so that its samples depend on the order of access, the
  number of workers, and where a run was resumed.
- Empty texts and files keep their end.
- A character cut by the start or end of a sample keeps its bytes.
- Texts with fewer tokens than the marks they would get stay unchanged.
- Padding is not in the loss.

Numpy only; knows nothing of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.masks import segments_after_ends
from trainyard.datasets.plain_text import Detokenizer, PlainText
from trainyard.datasets.sample_format import Sample, SampleFormat, build_samples, first
from trainyard.errors import ConfigError

MIN_TOKENS = 3
REPLACEMENT_CHARACTER = "\ufffd"
MAX_PARTIAL = 3
"""Tokens that a cut character can leave at either end: one byte less than the longest has."""


class Texts(Protocol):
    """A dataset of samples of text: `GPTDataset`."""

    @property
    def sample_format(self) -> SampleFormat:
        """How tokens become a sample."""

    def __len__(self) -> int:
        """Samples."""

    def text(self, index: int) -> NDArray[np.int64]:
        """Tokens of a sample, padded with the pad id."""

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2) source and sample number of each index."""

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.integer[Any]]:
        """(n,) the sample numbers alone."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Announce samples that will be read soon."""


class FIMDataset:
    """The samples of a dataset of text, some of their texts rearranged."""

    def __init__(self, texts: Texts, config: FimConfig, tokenizer: Detokenizer) -> None:
        self.texts = texts
        self._rearrange = Rearrangement(config, tokenizer)

    def __len__(self) -> int:
        return len(self.texts)

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2) source and sample number of each index."""
        return self.texts.ids(indices)

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.integer[Any]]:
        """(n,) the sample numbers alone."""
        return self.texts.numbers(indices)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Announce samples that will be read soon."""
        self.texts.prefetch(indices)

    def __getitem__(self, index: int) -> Sample:
        """The wrapped dataset's sample for the rearranged text."""
        text, sample_format = self.text(index), self.texts.sample_format
        segments = None
        if sample_format.inter_document_masking:  # the bounds of the file's documents are lost
            segments = segments_after_ends(
                (text[: sample_format.seq_length] == sample_format.eod)[None]
            )
        sample = first(build_samples(text[None], sample_format, segments))
        filler = sample["labels"] == self._rearrange.marks.pad
        sample["loss_mask"] = np.where(filler, np.float32(0), sample["loss_mask"])
        return sample

    def text(self, index: int) -> NDArray[np.int64]:
        """Tokens of a sample, as many as in the wrapped dataset."""
        text, pad = self.texts.text(index), self.texts.sample_format.pad
        filled = len(text)
        while filled and text[filled - 1] == pad:
            filled -= 1
        tokens = self._rearrange(text[:filled].tolist(), self._generator(index))[: len(text)]
        filler = pad if filled < len(text) else self._rearrange.marks.pad
        return np.array(tokens + [filler] * (len(text) - len(tokens)), np.int64)

    def _generator(self, index: int) -> np.random.RandomState:
        source, number = self.texts.ids(np.array([index]))[0].tolist()
        seed = self.texts.sample_format.seed % 2**32
        return np.random.RandomState([seed, source, number % 2**32, number >> 32])


@dataclass(frozen=True, slots=True)
class Marks:
    """Ids of the special tokens."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None


def find_marks(config: FimConfig, tokenizer: Detokenizer) -> Marks:
    """The ids of the tokens that the options name."""
    eod, split = config.fim_eod_token, config.fim_split_sample
    return Marks(
        prefix=token_id(tokenizer, config.fim_prefix_token, "--fim-prefix-token"),
        middle=token_id(tokenizer, config.fim_middle_token, "--fim-middle-token"),
        suffix=token_id(tokenizer, config.fim_suffix_token, "--fim-suffix-token"),
        pad=token_id(tokenizer, config.fim_pad_token, "--fim-pad-token"),
        eod=tokenizer.eod if eod is None else token_id(tokenizer, eod, "--fim-eod-token"),
        split=None if split is None else token_id(tokenizer, split, "--fim-split-sample"),
    )


def token_id(tokenizer: Detokenizer, token: str, flag: str) -> int:
    """The id of a token as written; ConfigError when the tokenizer takes it for several."""
    ids = tokenizer.encode(token)
    found = [i for i in ids if tokenizer.decode([i]) == token]
    if len(found) != 1:
        raise ConfigError(
            f"{flag} {token!r} is not a token of the tokenizer, which makes {len(ids)} of it; add "
            "it to the special tokens, or name the one that the tokenizer has"
        )
    return found[0]


class Rearrangement:
    """The rule: tokens and a generator in, tokens out."""

    def __init__(self, config: FimConfig, tokenizer: Detokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.marks = find_marks(config, tokenizer)
        self._encode = PlainText(tokenizer).encode

    def __call__(self, tokens: list[int], random: np.random.RandomState) -> list[int]:
        """The texts of a sample, each rearranged or not."""
        parts = split_at(tokens, self.marks.eod)
        return joined([self._text(part, random) for part in parts], self.marks.eod)

    def _text(self, tokens: list[int], random: np.random.RandomState) -> list[int]:
        split, rate = self.marks.split, self._config.fim_fragment_rate
        if split is None or rate is None or split not in tokens:
            return self._permuted(tokens, self._config.fim_rate, random)
        if random.random_sample() >= self._config.fim_rate:
            return tokens
        return joined([self._permuted(p, rate, random) for p in split_at(tokens, split)], split)

    def _permuted(self, tokens: list[int], rate: float, random: np.random.RandomState) -> list[int]:
        if len(tokens) < MIN_TOKENS or random.random_sample() >= rate:
            return tokens
        first, end, text = self._whole_characters(tokens)
        unwanted = self._config.fim_no_prefix
        if unwanted is not None and text.startswith(unwanted):
            return tokens
        low, high = sorted(random.randint(0, len(text) + 1, 2).tolist())
        prefix = tokens[:first] + self._encode(text[:low])
        middle = self._encode(text[low:high])
        suffix = self._encode(text[high:]) + tokens[end:]
        marks = self.marks
        if random.random_sample() < self._config.fim_spm_rate:
            return [marks.prefix, marks.suffix, *suffix, marks.middle, *prefix, *middle]
        return [marks.prefix, *prefix, marks.suffix, *suffix, marks.middle, *middle]

    def _whole_characters(self, tokens: list[int]) -> tuple[int, int, str]:
        """The tokens between which every character is whole, and their text."""
        decode, cut = self._tokenizer.decode, REPLACEMENT_CHARACTER
        first, end, text = 0, len(tokens), decode(tokens)
        few = range(1, min(MAX_PARTIAL, len(tokens) - 1) + 1)
        if text.startswith(cut):
            first = next((k for k in few if not decode(tokens[k:]).startswith(cut)), 0)
        if text.endswith(cut):
            end -= next((k for k in few if not decode(tokens[:-k]).endswith(cut)), 0)
        if first >= end:
            return 0, len(tokens), text
        return first, end, decode(tokens[first:end]) if first or end < len(tokens) else text


def split_at(tokens: list[int], separator: int) -> list[list[int]]:
    """The runs of tokens before, between and behind the separators."""
    runs, begin = [], 0
    for place, token in enumerate(tokens):
        if token == separator:
            runs.append(tokens[begin:place])
            begin = place + 1
    return [*runs, tokens[begin:]]


def joined(runs: list[list[int]], separator: int) -> list[int]:
    """The reverse of `split_at`."""
    tokens = runs[0].copy()
    for run in runs[1:]:
        tokens += [separator, *run]
    return tokens
