"""T5 samples: spans of words hidden from the encoder, for the decoder to spell out.

    text      the cat sat on the mat
    encoder   the <extra_id_0> sat <extra_id_1> mat
    decoder   <bos> <extra_id_0> cat <extra_id_1> on the
    labels    <extra_id_0> cat <extra_id_1> on the <eos>

The items are those of Megatron-LM, drawn in its order. If a sample has more spans than sentinels or
places in the decoder, Megatron-LM stops with an error; here the spans chosen last stay in the text.
An item depends only on the seed and its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.masked.config import MaskedConfig
from trainyard.datasets.masked.mapping import MappingRule
from trainyard.datasets.masked.masking import (
    MaskingRule,
    find_words,
    mask_words,
    sample_generator,
)
from trainyard.datasets.masked.sentences import (
    NOT_ASKED,
    SentenceDataset,
    mask_of,
    padded,
    special_id,
    word_beginnings,
)
from trainyard.datasets.sample_format import Sample
from trainyard.errors import ConfigError

MARKS = 2
"""Places of a sample that Megatron-LM keeps free of text."""

SPANS = MaskingRule(max_ngram=10, use_geometric_distribution=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Format:
    """How sentences become a sample; the same for all sources of a run."""

    seq_length: int
    """Length of the encoder's input."""
    decoder_seq_length: int
    seed: int
    vocab_size: int
    bos: int
    eos: int
    pad: int
    extra_ids: tuple[int, ...]
    """Sentinels, in the order in which they are used."""
    special: tuple[int, ...] = ()
    """Tokens that are never hidden."""
    begins_word: NDArray[np.bool_] | None = None
    """(vocabulary,) whether a token begins a word; None if every one does."""
    short_seq_prob: float = 0.1
    masking: MaskingRule = field(default_factory=lambda: SPANS)

    def __post_init__(self) -> None:
        """Refuse a format without sentinels, or too short for a span."""
        if not self.extra_ids:
            raise ConfigError("T5 data needs sentinel tokens: give --vocab-extra-ids 100")
        if self.seq_length < MARKS + 2 or self.decoder_seq_length < 3:
            raise ConfigError(
                f"--seq-length {self.seq_length} and --decoder-seq-length "
                f"{self.decoder_seq_length}: T5 samples need at least {MARKS + 2} and 3"
            )

    @staticmethod
    def of(
        tokenizer: object, data: MaskedConfig, seq_length: int, decoder_seq_length: int, seed: int
    ) -> T5Format:
        """With the special tokens of a tokenizer."""
        marks = {name: special_id(tokenizer, name, "T5") for name in ("bos", "eos", "pad")}
        found = (getattr(tokenizer, name, None) for name in ("cls", "sep"))
        vocab_size = special_id(tokenizer, "vocab_size", "T5")
        return T5Format(
            seq_length=seq_length,
            decoder_seq_length=decoder_seq_length,
            seed=seed,
            vocab_size=vocab_size,
            extra_ids=tuple(getattr(tokenizer, "extra_ids", None) or ()),
            special=tuple(token for token in found if isinstance(token, int)),
            begins_word=word_beginnings(tokenizer, vocab_size),
            short_seq_prob=data.short_seq_prob,
            masking=MaskingRule(data.mask_prob, SPANS.max_ngram, use_geometric_distribution=True),
            **marks,
        )

    @property
    def mapping(self) -> MappingRule:
        """The rule that gathers sentences into samples."""
        return MappingRule(self.seq_length - MARKS, self.short_seq_prob, self.seed, 1)


class T5Dataset(SentenceDataset[T5Format]):
    """Samples of one token file of sentences, over a range of its documents.

    Items have the masks of encoder and decoder as rows; `attention_mask` makes dense ones."""

    def __getitem__(self, index: int) -> Sample:
        """text_enc, enc_mask int64 (s,); text_dec, labels, dec_mask int64 and loss_mask float32
        (decoder length,); truncated, 0 or 1. Labels are -1 after the end."""
        sample_format = self.sample_format
        target = self.samples.target_length(index)
        whole = self.samples.tokens(self.samples.sentences(index))
        text = whole[:target]
        words = find_words(text, sample_format.begins_word, sample_format.special)
        budget = sample_format.masking.budget(len(text), target)
        random = sample_generator(sample_format.seed, index)
        chosen = mask_words(text, words, budget, sample_format.masking, random).spans
        spans = fitting(chosen, len(sample_format.extra_ids), sample_format.decoder_seq_length - 1)
        encoder, answer = cut_spans(text, spans, sample_format.extra_ids)
        decoder_length, filled = sample_format.decoder_seq_length, len(answer) + 1
        mask = mask_of(filled, decoder_length)
        return {
            "text_enc": padded(encoder, sample_format.seq_length, sample_format.pad),
            "text_dec": padded(
                np.append(sample_format.bos, answer), decoder_length, sample_format.pad
            ),
            "labels": padded(np.append(answer, sample_format.eos), decoder_length, NOT_ASKED),
            "loss_mask": mask.astype(np.float32),
            "truncated": np.array(len(whole) > target, np.int64),
            "enc_mask": mask_of(len(encoder), sample_format.seq_length),
            "dec_mask": mask,
        }


def fitting(spans: list[list[int]], num_sentinels: int, room: int) -> list[list[int]]:
    """The first chosen spans that have a sentinel and fit the decoder, in the order of the text."""
    kept: list[list[int]] = []
    for span in spans:
        if len(kept) < num_sentinels and len(span) + 1 <= room:
            kept.append(span)
            room -= len(span) + 1
    return sorted(kept)


def cut_spans(
    text: NDArray[np.int64], spans: list[list[int]], sentinels: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The text with a sentinel for each span, and the spans with their sentinels."""
    outside: list[int] = []
    inside: list[int] = []
    tokens, begin = text.tolist(), 0
    for span, sentinel in zip(spans, sentinels, strict=False):
        outside += [*tokens[begin : span[0]], sentinel]
        inside += [sentinel, *(tokens[place] for place in span)]
        begin = span[-1] + 1
    return np.array(outside + tokens[begin:], np.int64), np.array(inside, np.int64)


def attention_mask(
    queries: NDArray[np.int64], keys: NDArray[np.int64], causal: bool = False
) -> NDArray[np.bool_]:
    """(..., 1, q, k) dense mask from rows of 1 and 0, True where a token must not attend.

    Encoder: its row twice. Decoder: its row twice, causal. Across: the decoder's row, then the
    encoder's."""
    hidden: NDArray[np.bool_] = (queries[..., :, None] < 1) | (keys[..., None, :] < 1)
    if causal:
        hidden = hidden | (np.arange(keys.shape[-1]) > np.arange(queries.shape[-1])[:, None])
    return np.expand_dims(hidden, -3)
