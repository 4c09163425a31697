"""Which of many texts may have an n-gram of a set: by their bytes, some hundred kilobytes at once.

A token is a run of ASCII letters but k, digits and underscores; its first bytes count. The key of
an n-gram is some long tokens of it that follow each other if short ones are left out, which they
then do in each text that has it. Some texts are named in vain; each with an n-gram is named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from trainyard.collection.contamination.ngrams import CAPITAL_SIGMA, WORD
from trainyard.collection.words import lowered

Array = npt.NDArray[Any]

NO_TOKEN = ord("k")
"""A letter outside of ASCII, the Kelvin sign, has it as its lower case; no other is such a one."""
LAST_CASED = 0x1FFFF
"""No letter behind it has another case."""
TWO_LETTERS = 0x130
"""The only one that becomes two in lower case."""
FINAL_SIGMA = "\u03c2"
"""What the upper case of a sigma becomes at the end of a word, and nowhere else."""
SIZES = (2, 4, 6, 8)
"""Tokens of a key: as many as the n-gram has."""
STRETCH = 9
"""Words at the end of an n-gram that its key is of."""
LETTER_BYTES = 4
"""Of a letter in UTF-8, at most."""
FEW_LETTERS = 100
"""Of more, any one names a text."""
LEAST_TOKENS = 4
"""An n-gram with words of other letters and fewer tokens between two of them has no key."""
MOST_BYTES = 8
"""Of a token that count."""
PAD = 2 * MOST_BYTES

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SEVEN_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
HIGH_BITS = np.uint64(0x8080808080808080)
MOST = np.uint64((1 << 64) - 1)
LENGTH_BITS = np.uint64((2 * MOST_BYTES).bit_length())
PAIR_BITS = np.uint64(64) - LENGTH_BITS
TABLE_BITS = 22
SLOTS_A_HASH = 64
SHIFT = np.uint64(20)
SLOTS = np.uint64((1 << TABLE_BITS) - 1)


class Prefilter:
    """Knows a set of n-grams, words in lower case joined by blanks; those of a text in order are
    the fewest keys."""

    def __init__(self, ngrams: Iterable[str]) -> None:
        runs: list[str] = []
        words: set[str] = set()
        last = " \0 "
        for ngram in ngrams:
            if last in f" {ngram} ":
                continue
            run = ngram if ngram.isascii() else _ascii_run(ngram)
            end, num_tokens = _stretch(run)
            if num_tokens >= (SIZES[0] if ngram.isascii() else LEAST_TOKENS):
                runs.append(end)
                last = f" {end} "
            else:
                words.add(max(ngram.split(" "), key=lambda word: (max(word), len(word))))
        self._words: dict[str, set[str]] = {}
        """Of every n-gram without a key, a word, by its letter farthest from ASCII."""
        for word in words:
            self._words.setdefault(max(word), set()).add(word)
        self._longest = max(map(len, words), default=0)
        self.letters = _spelled(self._words.keys())
        """These letters in either case, of which a text with such an n-gram has one."""
        letters = re.escape("".join(sorted(self.letters)))
        is_few = len(self._words) <= FEW_LETTERS
        self._find_letter = None if is_few else re.compile(f"[{letters}]").search
        self.keys = _Keys(runs) if runs else None

    def has_word(self, text: str) -> bool:
        """Whether a text may have an n-gram without a key."""
        if self._find_letter is not None:
            return self._find_letter(text) is not None
        lower = lowered(text) if self._words else ""
        return any(
            not words.isdisjoint(_words_with(letter, lower, self._longest))
            for letter, words in self._words.items()
        )

    def may_have_word(self, text: bytes, place: int) -> bool:
        """Whether one of these letters, at a place of a string of JSON, may be of such a word."""
        letter = text[place : place + LETTER_BYTES].decode(errors="ignore")[:1]
        if letter in ("\\", CAPITAL_SIGMA) or self._find_letter is not None:
            return True  # an escape; a letter whose lower case depends on others; too many of them
        words = self._words.get(lowered(letter))
        if not words:
            return False
        reach = LETTER_BYTES * max(map(len, words))
        around = text[max(place - reach, 0) : place + reach]
        if b"\\u" in around or CAPITAL_SIGMA.encode() in around:
            return True
        lower = lowered(around.decode(errors="ignore"))
        return any(word in lower for word in words)

    def is_of_bytes(self, key: str) -> bool:
        """Whether the bytes of JSON tell which texts to name, if they have this key."""
        is_spelled = orjson.dumps(key)[1:-1] == key.encode()
        return is_spelled and not any(map(str.isascii, self.letters))

    def suspects(self, texts: Sequence[str]) -> list[int]:
        """Ascending numbers of the texts that may have an n-gram."""
        named = {number for number, text in enumerate(texts) if self.has_word(text)}
        if self.keys is not None:
            parts = [text.encode(errors="surrogatepass") for text in texts]
            ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)) + 1)
            places = self.keys.places(b"\n".join(parts))
            named.update(np.searchsorted(ends, places, "right").tolist())
        return sorted(named)


class _Keys:
    """The keys of runs of ASCII words."""

    def __init__(self, runs: Sequence[str]) -> None:
        data = _Bytes.of("\n".join(runs).encode())
        begins = np.cumsum([0, *(len(run) + 1 for run in runs)])
        counts = np.zeros(1)
        self.least = MOST_BYTES + 1
        """Bytes of a long token: so few that each run has eight, if it can. Keys of fewer name
        texts in vain, which takes longer than to look at every token."""
        while counts.min() < SIZES[-1] and self.least > 1:
            self.least -= 1
            starts = _starts(data, self.least)
            counts = np.diff(np.searchsorted(starts, begins))
        pairs = _pairs(_values(data, starts))
        first = np.searchsorted(starts, begins[:-1])
        lengths = np.append(_lengths(data, starts), [0] * SIZES[-1]).astype(np.uint64)
        lines = np.append(np.searchsorted(begins, starts, "right"), [0] * SIZES[-1])
        sizes = np.array(SIZES)[np.searchsorted(SIZES, counts, "right") - 1]
        self.first = SIZES[int(sizes.min() > SIZES[0])]
        """Tokens of a key that tell most places apart: two are often in order by chance."""
        begin = []
        self._keys: dict[int, _Hashes] = {}
        for size in sorted(set(sizes.tolist())):
            is_whole = lines[: len(pairs)] == lines[size - 1 : len(pairs) + size - 1]
            # Pairs of long tokens are rare. N-grams that overlap mostly choose the same.
            longs = lengths[: len(pairs)] + lengths[1 : len(pairs) + 1]
            order = np.where(is_whole, (pairs >> LENGTH_BITS) - (longs << PAIR_BITS), MOST)
            least = np.minimum.reduceat(order, first)
            is_chosen = is_whole & (order == least[lines[: len(pairs)] - 1])
            chosen = np.flatnonzero(is_chosen & (sizes == size)[lines[: len(pairs)] - 1])
            self._keys[size] = _Hashes.of(_key(pairs, chosen, size))
            begin.append(_key(pairs, chosen, self.first))
        self._begin = _Hashes.of(np.concatenate(begin))

    def places(self, data: bytes) -> Array:
        """Where keys are."""
        given = _Bytes.of(data)
        starts = _starts(given, self.least)
        pairs = _pairs(_values(given, starts))
        begin = pairs.copy()
        if self.first > SIZES[0]:
            begin[:-2] = begin[:-2] * MULTIPLIER + pairs[2:]
        near = self._begin.maybe(begin)
        return starts[near[self.are_keys([_key(pairs, near, size) for size in SIZES])]]

    def are_keys(self, hashes: Sequence[Array] | Array) -> Array:
        """Numbers of the tokens that begin a key. hashes: for each of SIZES, those of so many
        tokens from each on."""
        by_size = dict(zip(SIZES, hashes, strict=True))
        return np.concatenate([keys.found(by_size[size]) for size, keys in self._keys.items()])

    def are_first(self, hashes: Array) -> Array:
        """Numbers of the hashes of `first` tokens that may be those of a key, by other bits than
        `bits` has."""
        return np.flatnonzero(self._sieve.take((hashes & SLOTS).view(np.int64), mode="clip"))

    @cached_property
    def _sieve(self) -> Array:
        found = np.zeros(1 << TABLE_BITS, np.bool_)
        found[self._begin.ascending & SLOTS] = True
        return found

    @cached_property
    def bits(self) -> Array:
        """Whether `first` tokens may begin a key, by their slot, in bits of u64; as few slots as
        tell most apart, since a processor reaches a small table in less time."""
        count = SLOTS_A_HASH * len(self._begin.ascending)
        table = self._begin.table.reshape(-1, min(1 << count.bit_length(), 1 << TABLE_BITS))
        return np.packbits(table.any(axis=0), bitorder="little").view("<u8")


class _Hashes(NamedTuple):
    """Some hashes, and what tells most others apart."""

    ascending: Array
    table: Array
    """(1 << TABLE_BITS,) whether a hash has a slot."""

    @staticmethod
    def of(hashes: Array) -> _Hashes:
        """Of any, several times too."""
        table = np.zeros(1 << TABLE_BITS, np.bool_)
        table[_slots(hashes)] = True
        ascending = np.sort(hashes)  # not np.unique, which imports a part of numpy for 40 ms
        is_new = np.ones(len(ascending), np.bool_)
        is_new[1:] = ascending[1:] != ascending[:-1]
        return _Hashes(ascending[is_new], table)

    def maybe(self, given: Array) -> Array:
        """Where those given may be one."""
        return np.flatnonzero(self.table.take(_slots(given), mode="clip"))

    def found(self, given: Array) -> Array:
        """Where those given are one."""
        near = self.maybe(given)
        at = np.minimum(np.searchsorted(self.ascending, given[near]), len(self.ascending) - 1)
        found: Array = near[self.ascending[at] == given[near]]
        return found


class _Bytes(NamedTuple):
    """Bytes of texts, with some zeros around them."""

    size: int
    is_inside: Array
    """(size + PAD,) whether a byte is of a token; byte n of the texts is at n + 1."""
    lower: Array
    """(size + PAD,) u8 in lower case, 0 where no token is."""

    @staticmethod
    def of(data: bytes) -> _Bytes:
        """Look at each byte."""
        given = np.frombuffer(b"\0" + data + bytes(PAD - 1), np.uint8)
        lower = given | np.uint8(0x20)
        scratch = lower - np.uint8(ord("a"))
        inside = scratch < 26
        inside &= lower != NO_TOKEN
        np.subtract(given, np.uint8(ord("0")), out=scratch)
        inside |= scratch < 10
        inside |= given == ord("_")
        lower *= inside.view(np.uint8)
        return _Bytes(len(data), inside, lower)


def _starts(data: _Bytes, least: int) -> Array:
    """Where tokens of so many bytes or more begin."""
    inside = data.is_inside
    count = -(-data.size // 4) * 4  # whole groups of four bytes
    begins = inside[1 : count + 1] > inside[:count]
    for more in range(1, least):
        begins &= inside[1 + more : count + 1 + more]
    return _true(begins) if least >= 3 else np.flatnonzero(begins)


def _lengths(data: _Bytes, starts: Array) -> Array:
    """How many bytes of these tokens count."""
    ends = np.flatnonzero(data.is_inside[1:-1] > data.is_inside[2:]) + 1
    found: Array = np.minimum(ends[np.searchsorted(ends, starts, "right")] - starts, MOST_BYTES)
    return found


def _true(flags: Array) -> Array:
    """Where a flag is set, of flags of which no two of four are; numpy's own way is slow where one
    in twenty is."""
    groups = flags.view("<u4")
    which = np.flatnonzero(groups != 0)
    inside = np.bitwise_count(groups[which] - np.uint32(1)) >> np.uint8(3)
    found: Array = which * 4 + inside
    return found


def _values(data: _Bytes, starts: Array) -> Array:
    """u64 values of tokens by their first MOST_BYTES bytes."""
    windows = np.ndarray((data.size + 1,), "<u8", data.lower.data, offset=1, strides=(1,))
    values = windows[starts]
    ends = ~(values + SEVEN_BITS) & HIGH_BITS  # of the bytes that are 0
    values &= ends ^ (ends - np.uint64(1))  # what is before the first of them
    values *= MULTIPLIER
    values ^= values >> np.uint64(29)
    return values


def _pairs(values: Array) -> Array:
    """Hashes of each token with the next."""
    found: Array = values[:-1] * MULTIPLIER + values[1:]
    return found


def _key(pairs: Array, chosen: Array, size: int) -> Array:
    """Hashes of so many tokens from those on; behind the last, any."""
    found = pairs[chosen]
    for more in range(2, size, 2):
        found = found * MULTIPLIER + pairs[np.minimum(chosen + more, len(pairs) - 1)]
    return found


def _slots(pairs: Array) -> Array:
    """Place in the table. The high bits of the least pairs are alike."""
    found: Array = ((pairs >> SHIFT) & SLOTS).view(np.int64)
    return found


def _spelled(letters: Set[str]) -> set[str]:
    """These letters in lower and upper case."""
    found = set(letters)
    if FINAL_SIGMA in found:
        found.add(FINAL_SIGMA.upper())
    given, lower = _letters_and_lower_case() if found else ("", "")
    for letter in letters:
        at = lower.find(letter)
        while at >= 0:
            found.add(given[at])
            at = lower.find(letter, at + 1)
    return found


@cache
def _letters_and_lower_case() -> tuple[str, str]:
    """All letters that have another case, some others too, and the lower case of each."""
    letters = "".join(map(chr, (*range(TWO_LETTERS), *range(TWO_LETTERS + 1, LAST_CASED + 1))))
    return letters, letters.lower()


def _stretch(run: str) -> tuple[str, int]:
    """What a run ends with, which n-grams that follow it in a text have too, and its number of
    tokens; the whole of a run whose end has few."""
    parts = run.rsplit(" ", STRETCH)
    end = run[len(parts[0]) + 1 :] if len(parts) > STRETCH else run
    count = _num_tokens(end)
    return (end, count) if count >= SIZES[-1] else (run, _num_tokens(run))


def _num_tokens(run: str) -> int:
    """Of ASCII words, at least. Only of those that begin with no token one may be without."""
    letter = chr(NO_TOKEN)
    if run and not run.startswith(letter) and f" {letter}" not in run:
        return 1 + run.count(" ")
    return len(run.replace(letter, " ").split())


def _words_with(letter: str, text: str, longest: int) -> Iterator[str]:
    """The words of a text that have a letter. Of one with more letters than the longest, a part
    with more, since it may be far longer."""
    at = text.find(letter)
    while at >= 0:
        found = WORD.match(text, at, at + longest + 1)
        assert found is not None, "a letter of a word"
        before = WORD.match(text[max(at - longest, 0) : at][::-1])
        yield text[at - (before.end() if before else 0) : found.end()]
        at = text.find(letter, found.end())


def _ascii_run(ngram: str) -> str:
    """The longest run of ASCII words."""
    runs = (" ".join(run) for is_ascii, run in groupby(ngram.split(" "), str.isascii) if is_ascii)
    return max(runs, key=len, default="")
