"""Samples for supervised fine-tuning: conversations and questions, of which only the answers are in
the loss.

With packing by line, as in Megatron-LM, a sample is the conversations of one line. Each has an end
of document, positions from 0 and bounds (`cu_seqlens`); tokens that do not fit are cut off. Without
packing a sample is one conversation, cut to leave room for its end.

Differences from Megatron-LM: padding is left out of the loss by position, so if the pad id is also
the end of document, ends stay in the loss. The first token of a conversation is not predicted from
the one before it. Several lines can share a sample (`packing="lines"`). An item depends only on its
number. Numpy only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.fine_tuning.config import Packing
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.questions import task_of
from trainyard.datasets.fine_tuning.records import QuestionRecord, Record, split_conversations
from trainyard.datasets.fine_tuning.tokenize import IGNORED
from trainyard.datasets.sample_format import Sample, ids_in_one_source, spelled_out
from trainyard.errors import ConfigError, DataError

log = logging.getLogger(__name__)

Pair = tuple[NDArray[Any], NDArray[Any]]
"""Tokens of a conversation or question and, for each, its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftFormat:
    """How conversations become a sample; the same for all sources of a run."""

    seq_length: int
    eod: int
    pad: int | None = None
    """Pads samples; left out of the loss by position, so it may be any id."""
    packing: Packing = "line"
    context_parallel_size: int = 1
    """Above 1, conversations are padded to a multiple of twice this size, as each rank has two
    equal pieces of each."""

    def __post_init__(self) -> None:
        """Refuse lengths that the context-parallel ranks cannot share."""
        if self.seq_length < 2:
            raise ConfigError(f"--seq-length must be at least 2, got {self.seq_length}")
        if self.seq_length % self.multiple:
            raise ConfigError(
                f"--seq-length ({self.seq_length}) must be divisible by twice "
                f"--context-parallel-size ({self.context_parallel_size})"
            )
        if self.packing == "off" and self.context_parallel_size > 1:
            raise ConfigError(
                "--sft-packing off does not work with --context-parallel-size "
                f"({self.context_parallel_size}); use --sft-packing line"
            )

    @property
    def multiple(self) -> int:
        """The number of tokens of a conversation is a multiple of this."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def filler(self) -> int:
        """The id that pads samples."""
        return self.eod if self.pad is None else self.pad


Tokenized = tuple[Sequence[int] | NDArray[Any], Sequence[int] | NDArray[Any]]


class RecordTokenizer(Protocol):
    """Makes tokens of records, and targets: the token, or -100 if it is not learnt."""

    def tokenize_conversation(self, conversation: Sequence[dict[str, Any]]) -> Tokenized:
        """Tokens and targets of one conversation."""

    def tokenize_question(self, record: QuestionRecord, task: str, room: int) -> Tokenized:
        """Tokens and targets of a question and its answer, at most `room` of them. task: the name
        of its data set."""


class SFTDataset:
    """Samples of some lines of one file of conversations, in order; more samples than lines repeat
    them from the first.

    lengths: (lines,) the result of `line_lengths`, if it is known already. Only packing="lines"
    needs it, and otherwise computes it by tokenising every line."""

    def __init__(
        self,
        file: ConversationFile,
        lines: range,
        num_samples: int | None,
        sample_format: SftFormat,
        tokenizer: RecordTokenizer,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        if not lines:
            raise DataError(f"{file.url}: the split has none of its {len(file)} lines")
        assert lines[-1] < len(file)
        self.file = file
        self.lines = lines
        self.sample_format = sample_format
        self._tokenizer = tokenizer
        self._task = task_of(file.url)
        self._warned = False
        self._bins: Bins | None = None
        if sample_format.packing == "lines":
            if lengths is None:
                lengths = self.line_lengths()
            self._bins = first_fit(lengths, sample_format.seq_length)
        self._count = len(lines) if self._bins is None else len(self._bins)
        self._num_samples = self._count if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples

    def prefetch(self, indices: Sequence[int]) -> None:
        """Nothing: the file is on this machine."""

    def ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): 0, and the number of the line, or of the group of lines."""
        return ids_in_one_source(self.numbers(indices))

    def numbers(self, indices: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """(n,) the number of the line, or of the group of lines."""
        return spelled_out(indices) % self._count

    def __getitem__(self, index: int) -> Sample:
        """tokens, labels, position_ids int64 (s,), loss_mask float32 (s,); with packing also
        cu_seqlens int32 (s + 1,), s after the last bound, and max_seqlen. Labels are -100 for
        tokens that are not learnt."""
        members = self._members(index % self._count)
        if self.sample_format.packing == "off":
            return pad_conversation(
                self._tokens(self.lines[members[0]], whole=True)[0], self.sample_format
            )
        pairs = [pair for line in members for pair in self._tokens(self.lines[line])]
        sample, used = pack_conversations(pairs, self.sample_format)
        if used > self.sample_format.seq_length and not self._warned:
            self._warned = True
            log.warning(
                "%s: %d tokens, cut to --seq-length %d; further cuts are not logged",
                *(self.file.where(self.lines[members[0]]), used, self.sample_format.seq_length),
            )
        return sample

    def line_lengths(self) -> NDArray[np.int64]:
        """(lines,) tokens that each line takes in a sample."""
        return np.array(
            [
                sum(rounded(len(tokens), self.sample_format) for tokens, _ in self._tokens(line))
                for line in self.lines
            ],
            np.int64,
        )

    def _members(self, sample: int) -> list[int]:
        return [sample] if self._bins is None else self._bins[sample]

    def _tokens(self, line: int, whole: bool = False) -> list[Pair]:
        """Tokens and targets of each conversation of a line, or of its question, with its end."""
        record = self.file[line]
        if isinstance(record, dict) or whole:
            return [self._tokenized(record, line, whole)]
        return [self._tokenized(turns, line, whole) for turns in split_conversations(record)]

    def _tokenized(self, record: Record, line: int, whole: bool) -> Pair:
        limit = self.sample_format.seq_length - 1  # leaves room for the end of document
        try:
            if isinstance(record, dict):
                found = self._tokenizer.tokenize_question(record, self._task, limit)
            else:
                found = self._tokenizer.tokenize_conversation(record)
        except (DataError, ValueError) as fault:
            raise DataError(f"{self.file.where(line)}: {fault}") from None
        tokens, targets = map(np.asarray, found)
        if not len(tokens) or len(tokens) != len(targets):
            raise DataError(
                f"{self.file.where(line)}: a conversation has {len(tokens)} tokens but "
                f"{len(targets)} targets; is the chat template that of the tokenizer?"
            )
        if whole:
            tokens, targets = tokens[:limit], targets[:limit]
        if whole or tokens[-1] != self.sample_format.eod:
            tokens, targets = (
                np.append(tokens, self.sample_format.eod),
                np.append(targets, self.sample_format.eod),
            )
        return tokens, targets


def rounded(num_tokens: int, sample_format: SftFormat) -> int:
    """Tokens that a conversation takes in a sample."""
    return -(-num_tokens // sample_format.multiple) * sample_format.multiple


def pad_conversation(pair: Pair, sample_format: SftFormat) -> Sample:
    """One conversation of at most s tokens, padded."""
    tokens, targets = pair
    sample = _rows([tokens], [targets], sample_format)
    sample["position_ids"] = np.arange(sample_format.seq_length, dtype=np.int64)
    return sample


def pack_conversations(pairs: Iterable[Pair], sample_format: SftFormat) -> tuple[Sample, int]:
    """Conversations one after the other, cut off at s, and the number of tokens before the cut. The
    last one includes the padding."""
    s, begins, used = sample_format.seq_length, [], 0
    tokens: list[NDArray[Any]] = []
    targets: list[NDArray[Any]] = []
    for ids, wanted in pairs:
        filler = rounded(len(ids), sample_format) - len(ids)
        if used < s:
            begins.append(used)
            tokens.append(np.append(ids, [sample_format.filler] * filler).astype(np.int64))
            targets.append(np.append(wanted, [IGNORED] * filler).astype(np.int64))
            targets[-1][0] = IGNORED
        used += len(ids) + filler
    sample = _rows(tokens, targets, sample_format)
    bounds = np.full(s + 1, s, np.int32)
    bounds[: len(begins)] = begins
    lengths = np.diff([*begins, s])
    sample["position_ids"] = np.arange(s) - np.repeat(begins, lengths)
    sample["cu_seqlens"] = bounds
    sample["max_seqlen"] = np.array(lengths.max(), np.int32)
    return sample, used


def _rows(
    tokens: list[NDArray[Any]], targets: list[NDArray[Any]], sample_format: SftFormat
) -> Sample:
    """Tokens, and the target after each as its label; both cut or padded to s."""
    s = sample_format.seq_length
    row = np.full(s + 1, sample_format.filler, np.int64)
    goal = np.full(s + 1, IGNORED, np.int64)
    text, wanted = np.concatenate(tokens)[:s], np.concatenate(targets)[:s]
    row[: len(text)], goal[: len(wanted)] = text, wanted
    labels = goal[1:]
    return {
        "tokens": row[:-1],
        "labels": labels,
        "loss_mask": (labels != IGNORED).astype(np.float32),
    }


# --- which lines share a sample ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bins:
    """Items grouped into samples."""

    items: NDArray[np.int64]
    """(n,) the items of all samples, sample by sample, in their order within each."""
    bounds: NDArray[np.int64]
    """(samples + 1,) sample k is items[bounds[k]:bounds[k + 1]]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, sample: int) -> list[int]:
        items: list[int] = self.items[self.bounds[sample] : self.bounds[sample + 1]].tolist()
        return items


def first_fit(lengths: NDArray[np.int64], capacity: int) -> Bins:
    """Each item in turn goes to the first sample that has room for it, else to a new one; one
    longer than a sample has it alone."""
    chosen = np.empty(len(lengths), np.int64)
    rooms = _Rooms(len(lengths))
    count = 0
    for item, length in enumerate(np.minimum(lengths, capacity).tolist()):
        place = rooms.first_with(length)
        if place >= count:
            place, count = count, count + 1
            rooms.set(place, capacity)
        rooms.set(place, rooms.of(place) - length)
        chosen[item] = place
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(chosen, minlength=count), out=bounds[1:])
    return Bins(np.argsort(chosen, kind="stable"), bounds)


class _Rooms:
    """Room left in each sample, in a tree whose nodes hold the maximum of their children."""

    def __init__(self, count: int) -> None:
        self._leaves = 1 << max(count - 1, 1).bit_length()
        self._most = [-1] * (2 * self._leaves)

    def of(self, place: int) -> int:
        return self._most[self._leaves + place]

    def first_with(self, length: int) -> int:
        """The first place with at least `length` room; the number of leaves if there is none."""
        if self._most[1] < length:
            return self._leaves
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._most[node] < length
        return node - self._leaves

    def set(self, place: int, room: int) -> None:
        node, most = self._leaves + place, self._most
        most[node] = room
        while node > 1:
            node //= 2
            best = max(most[2 * node], most[2 * node + 1])
            if most[node] == best:
                break
            most[node] = best
