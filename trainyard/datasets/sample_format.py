"""Makes samples from text: tokens, labels, positions and masks, as the options say.

The items are those of Megatron-LM without its dense attention mask; samples have the bounds of
documents instead, if needed (`masks`). Numpy only; knows nothing of files."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.config import DataConfig
from trainyard.datasets.masks import (
    Segments,
    attention_mask,
    cu_seqlens,
    positions,
    segments_after_ends,
)

log = logging.getLogger(__name__)

NO_PAD = -1
"""An id that no token has."""

MAX_BATCH = 1 << 20
"""Samples that can be built together."""

Sample = dict[str, NDArray[Any]]
"""One sample, or several stacked: a first axis more in every array."""


class Dataset(Protocol):
    """The interface of a dataset for the loader and the ledger.

    The loader calls `__getitems__(indices)` for whole batches if a dataset has it; it returns
    stacked samples. The loader calls `prefetch(indices)`, if it exists, before it needs samples, so
    that a dataset can fetch remote tokens ahead; it returns at once, or after it has located those
    tokens."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int) -> Sample:
        """tokens, labels, position_ids int64 (s,) and loss_mask float32 (s,), at least."""

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2) source and sample number of each index, which the ledger digests. They must be the
        same in every process, and not depend on the other indices."""


def ids_in_one_source(numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """(n, 2) ids of samples with these numbers in source 0. Quick for a few, as a step asks each of
    a thousand sources for its own."""
    ids = np.zeros((len(numbers), 2), np.int64)
    ids[:, 1] = numbers
    return ids


def spelled_out(indices: NDArray[np.int64] | slice) -> NDArray[np.int64]:
    """(n,) the indices that a slice with begin and end stands for."""
    return np.arange(indices.start, indices.stop) if isinstance(indices, slice) else indices


@dataclass(frozen=True, slots=True)
class SampleFormat:
    """How tokens become a sample; the same for all sources of a run."""

    seq_length: int
    seed: int
    vocab_size: int
    """Ids at or above it are an error in the data."""
    eod: int
    pad: int = NO_PAD
    """Pads a last partial sample. In samples it becomes 0 and is not in the loss."""
    reset_position_ids: bool = False
    """Whether positions restart from 0 after each end of document."""
    eod_mask_loss: bool = False
    """Whether the token after an end of document is left out of the loss."""
    reset_attention_mask: bool = False
    """Whether samples have `cu_seqlens` and `max_seqlen`, from the ends of document in them."""
    inter_document_masking: bool = False
    """The same from where documents of the file begin, and positions restart there too; overrides
    the two resets."""
    create_attention_mask: bool = False
    """Whether samples have `attention_mask`, (1, s, s)."""
    extra_token: bool = True
    """Whether a sample draws one token more than s, its last label; otherwise that is padding."""

    @property
    def text_length(self) -> int:
        """Tokens that a sample draws."""
        return self.seq_length + int(self.extra_token)


class Vocabulary(Protocol):
    """The part of a tokenizer that is used; other special tokens are attributes by their names."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def pad(self) -> int | None:
        """Id that pads a row, or None."""


SPECIAL = ("bos", "eos", "cls", "sep", "mask", "unk")


def sample_format(
    data: DataConfig, tokenizer: Vocabulary, seq_length: int, seed: int
) -> SampleFormat:
    """The format that the options describe."""
    named = (getattr(tokenizer, name, None) for name in SPECIAL)
    others = {tokenizer.eod, *(i for i in named if isinstance(i, int))}
    return SampleFormat(
        seq_length,
        seed,
        tokenizer.vocab_size,
        tokenizer.eod,
        pad_id(tokenizer.pad, others, data.allow_ambiguous_pad_tokens),
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
        reset_attention_mask=data.reset_attention_mask,
        inter_document_masking=data.dataloader_inter_document_masking,
        create_attention_mask=data.create_attention_mask_in_dataloader,
    )


def pad_id(pad: int | None, others: Collection[int], allow_ambiguous: bool = False) -> int:
    """The id to pad samples with. others: the tokenizer's other special ids.

    A pad that is also the end of document, for example, would leave every end of document out of
    the loss. So it is replaced by an id that no token has, unless `allow_ambiguous`."""
    if pad is None:
        return NO_PAD
    if pad not in others:
        return pad
    if allow_ambiguous:
        log.warning(
            "the pad id %d is another special id too; with --allow-ambiguous-pad-tokens every such "
            "token is left out of the loss",
            pad,
        )
        return pad
    log.info("the pad id %d is another special id too, so samples are padded without it", pad)
    return NO_PAD


def build_samples(
    text: NDArray[Any], sample_format: SampleFormat, segments: Segments | None = None
) -> Sample:
    """Stacked samples from text: tokens are text[:, :s], labels the token after each.

    text: (b, s + 1) tokens of any integer type; (b, s) without the extra token. segments: the
    documents of the (b, s) tokens, for --dataloader-inter-document-masking.
    Arrays that are the same for every sample are shared, and therefore read-only."""
    b, s = len(text), sample_format.seq_length
    tokens = text[:, :s].astype(np.int64)
    labels = (
        text[:, 1:].astype(np.int64)
        if sample_format.extra_token
        else _shifted(tokens, sample_format.pad)
    )
    places, loss_mask = (constant[:b] for constant in _constants(s))
    ends = None
    if (
        sample_format.eod_mask_loss
        or sample_format.reset_position_ids
        or sample_format.reset_attention_mask
    ):
        ends = text[:, :s] == sample_format.eod
    if sample_format.eod_mask_loss and ends is not None:
        loss_mask = np.logical_not(ends).astype(np.float32)
    if not sample_format.extra_token or (
        _can_hold(text, sample_format.pad) and (text == sample_format.pad).any()
    ):
        padding = labels == sample_format.pad
        loss_mask = np.where(padding, np.float32(0), loss_mask)
        tokens[tokens == sample_format.pad] = 0
        labels[padding] = 0
    sample = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": places,
    }
    _add_documents(sample, sample_format, ends, segments)
    return sample


def _add_documents(
    sample: Sample,
    sample_format: SampleFormat,
    ends: NDArray[np.bool_] | None,
    segments: Segments | None,
) -> None:
    by_file = segments is not None
    by_ends = sample_format.reset_position_ids or sample_format.reset_attention_mask
    if segments is None and ends is not None and by_ends:
        segments = segments_after_ends(ends)
    bounds = None
    if segments is not None and (sample_format.reset_position_ids or by_file):
        sample["position_ids"] = positions(segments)
    if segments is not None and (sample_format.reset_attention_mask or by_file):
        bounds, longest = cu_seqlens(segments)
        sample["cu_seqlens"], sample["max_seqlen"] = bounds, longest
    if sample_format.create_attention_mask:
        mask = attention_mask(bounds, sample_format.seq_length)
        sample["attention_mask"] = np.broadcast_to(mask, (len(sample["tokens"]), *mask.shape[-3:]))


def _shifted(tokens: NDArray[np.int64], last: int) -> NDArray[np.int64]:
    labels = np.full_like(tokens, last)
    labels[:, :-1] = tokens[:, 1:]
    return labels


def _can_hold(text: NDArray[Any], token: int) -> bool:
    return token >= 0 or text.dtype.kind != "u"


@cache
def _constants(seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(MAX_BATCH, s) plain positions and a loss mask of ones; one row each in memory."""
    shape = (MAX_BATCH, seq_length)
    return (
        np.broadcast_to(np.arange(seq_length, dtype=np.int64), shape),
        np.broadcast_to(np.ones(seq_length, np.float32), shape),
    )


def first(stacked: Sample) -> Sample:
    """The first of stacked samples."""
    return {key: values[0] for key, values in stacked.items()}


def build_sample(text: NDArray[Any], sample_format: SampleFormat) -> Sample:
    """One sample from (s + 1,) tokens, as `build_samples`."""
    return first(build_samples(text[None], sample_format))


def positions_in_documents(tokens: NDArray[Any], eod: int) -> NDArray[np.int64]:
    """(s,) place of each token in its document; an end of document belongs to the one it ends."""
    places: NDArray[np.int64] = positions(segments_after_ends((tokens == eod)[None]))[0]
    return places
