"""What to compute next: which texts, how many tokens of each, in which blocks, and in which slot
the states of each. No torch.

Continuous batching: every step takes a token of each text that is being continued, and fills the
rest of its budget with prompts, in chunks. A text is admitted when there are blocks for all of its
tokens, beside a reserve for the growth of the others; a text that finds no block for its next token
takes those of the least urgent one, which is computed again later (recomputation). So the most
urgent text always ends, and no step needs more than there is."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainyard.inference.dynamic.blocks import NO_TEXT, BlockPool, Digest, digest_of

NO_SLOT = -1
"""Of a text that waits."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A text: its prompt and output so far, and what the cache holds of it."""

    number: int
    """Of its arrival."""
    priority: int
    """Lower ones are more urgent."""
    tokens: list[int]
    """Prompt and output."""
    finds_blocks: bool = True
    """Whether published blocks spare it the computation."""
    num_computed: int = 0
    """Tokens whose keys and values are in `blocks`."""
    num_found: int = 0
    """Of these, those that were found when it was first admitted."""
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """Of its full blocks, as far as they were needed."""
    slot: int = NO_SLOT
    """Where the states of its layers are while it runs, if they have any."""
    was_admitted: bool = False

    @property
    def urgency(self) -> tuple[int, int]:
        """Least is first: by priority, then by arrival."""
        return self.priority, self.number


class Work(NamedTuple):
    """The part of a step that belongs to one text."""

    sequence: Sequence
    start: int
    """Position of the first token."""
    num_known: int
    """Known tokens to compute from there."""
    guesses: tuple[int, ...] = ()
    """Tokens that may follow, computed with the last known one."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.num_known + len(self.guesses)

    @property
    def is_last(self) -> bool:
        """Whether the next token of the text comes of it."""
        return self.start + self.num_known == len(self.sequence.tokens)


Guess = Callable[[Sequence], tuple[int, ...]]
"""Tokens that may follow a text."""


class Scheduler:
    """The texts that wait and those that run, and the blocks and slots that these hold."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        max_requests: int,
        max_tokens: int,
        reserve: int = 0,
        chunked: bool = True,
    ) -> None:
        """block_size: tokens of a block. max_requests: texts that run at once, each in a slot.
        max_tokens: of a step. reserve: blocks that an admission leaves free while other texts run.
        chunked: prompts are cut to what is left of a step; otherwise a longer one has a step of its
        own."""
        assert max_tokens >= max_requests, "a step has a token of each text that runs"
        self.pool, self.block_size = pool, block_size
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.reserve, self.chunked = reserve, chunked
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both the most urgent first."""
        self._free_slots = list(range(max_requests))
        self.preemptions = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a text, whose tokens and output the pool has room for if it runs alone."""
        insort(self.waiting, sequence, key=lambda one: one.urgency)

    def remove(self, sequence: Sequence) -> None:
        """Forget a text that has ended or is not wanted, and free its blocks."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._release(sequence)

    def schedule(self, guess: Guess | None = None) -> list[Work]:
        """The next step, whose tokens have their blocks; empty if there is nothing to do.

        guess: asked for each text that is being continued."""
        works: dict[Sequence, Work] = {}
        before = self.preemptions
        left = self._continue(works, guess)
        if self.preemptions == before:
            self._admit(works, left)
        return list(works.values())

    def advance(self, work: Work, num_computed: int) -> None:
        """Take note that the cache holds the first `num_computed` tokens of a text."""
        sequence, size = work.sequence, self.block_size
        sequence.num_computed = num_computed
        if (end := num_computed // size) == work.start // size:
            return
        self._name_blocks(sequence, end)
        for place in range(work.start // size, end):
            self.pool.publish(sequence.blocks[place], sequence.digests[place])

    # --- texts that run -------------------------------------------------------------------

    def _continue(self, works: dict[Sequence, Work], guess: Guess | None) -> int:
        """Schedule the texts that run, and return what is left of the tokens of a step."""
        left, place = self.max_tokens, 0
        while place < len(self.running) and left > 0:
            sequence = self.running[place]
            start = sequence.num_computed
            count = len(sequence.tokens) - start
            # One token is left for every text behind this one.
            own = left - (len(self.running) - place - 1)
            if self.chunked:
                count = min(count, own)
            elif count > left and works:
                break
            guesses: tuple[int, ...] = ()
            if guess is not None and count == 1 and start + 1 == len(sequence.tokens):
                guesses = self._that_fit(sequence, guess(sequence)[: max(own - 1, 0)])
            if not self._make_room(sequence, start + count + len(guesses)):
                break
            works[sequence] = Work(sequence, start, count, guesses)
            left -= count + len(guesses)
            place += 1
        return left

    def _that_fit(self, sequence: Sequence, guesses: tuple[int, ...]) -> tuple[int, ...]:
        """The guesses for which no text has to give up a block."""
        room = len(sequence.blocks) + self.pool.num_free
        return guesses[: max(room * self.block_size - len(sequence.tokens), 0)]

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Give a text blocks for its first `end` tokens, taken from less urgent ones if need be.
        False if it is itself the least urgent, and waits again."""
        needed = self.blocks_for(end) - len(sequence.blocks)
        while needed > self.pool.num_free:
            least = self.running[-1]
            self._preempt(least)
            if least is sequence:
                return False
        if needed > 0:
            sequence.blocks += self.pool.take(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a text, which is computed again when there are some."""
        self.running.remove(sequence)
        self._release(sequence)
        self.add(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0
        if sequence.slot != NO_SLOT:
            self._free_slots.append(sequence.slot)
            sequence.slot = NO_SLOT

    # --- texts that wait ------------------------------------------------------------------

    def _admit(self, works: dict[Sequence, Work], left: int) -> None:
        """Let the most urgent texts in, as far as places, blocks and tokens of the step allow."""
        while self.waiting and left > 0:
            sequence = self.waiting[0]
            found = self._published(sequence)
            start = len(found) * self.block_size
            count = len(sequence.tokens) - start
            if not self.chunked and count > left and works:
                return
            if not self._fits(sequence, found):
                freed = self._yield_to(sequence, found, works)
                if freed is None:
                    return
                left += freed
            self.waiting.pop(0)
            self.pool.share(found)
            own = self.pool.take(self.blocks_for(len(sequence.tokens)) - len(found))
            sequence.blocks, sequence.num_computed = [*found, *own], start
            sequence.slot = self._free_slots.pop()
            if not sequence.was_admitted:
                sequence.was_admitted, sequence.num_found = True, start
            insort(self.running, sequence, key=lambda one: one.urgency)
            if self.chunked:
                count = min(count, left)
            works[sequence] = Work(sequence, start, count)
            left -= count

    def _published(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a text, without its last token, which is computed."""
        if not sequence.finds_blocks:
            return []
        whole = (len(sequence.tokens) - 1) // self.block_size
        self._name_blocks(sequence, whole)
        return self.pool.find(sequence.digests[:whole])

    def _name_blocks(self, sequence: Sequence, count: int) -> None:
        """Fill in the digests of the first `count` blocks of a text."""
        size, digests = self.block_size, sequence.digests
        for place in range(len(digests), count):
            before = digests[-1] if digests else NO_TEXT
            digests.append(digest_of(before, sequence.tokens[place * size : (place + 1) * size]))

    def _missing(self, sequence: Sequence, found: list[int]) -> int:
        """Free blocks that the admission of a text would use up."""
        revived = sum(self.pool.holders(block) == 0 for block in found)
        return self.blocks_for(len(sequence.tokens)) - len(found) + revived

    def _fits(self, sequence: Sequence, found: list[int]) -> bool:
        reserve = self.reserve if self.running else 0
        enough = self._missing(sequence, found) + reserve <= self.pool.num_free
        return enough and len(self.running) < self.max_requests

    def _yield_to(
        self, sequence: Sequence, found: list[int], works: dict[Sequence, Work]
    ) -> int | None:
        """Preempt texts of lower priority until this one fits; the tokens of the step that this
        gives back. None, and nothing is done, if it would not fit even then."""
        lower = [one for one in self.running if one.priority > sequence.priority]
        blocks = {block for one in lower for block in one.blocks} - set(found)
        own = sum(self.pool.holders(block) == 1 for block in blocks)
        reserve = self.reserve if len(lower) < len(self.running) else 0
        if not lower or self._missing(sequence, found) + reserve > self.pool.num_free + own:
            return None
        freed = 0
        while not self._fits(sequence, found):
            least = self.running[-1]
            assert least.priority > sequence.priority, "the blocks of the others were counted"
            dropped = works.pop(least, None)
            freed += 0 if dropped is None else dropped.end - dropped.start
            self._preempt(least)
        return freed
