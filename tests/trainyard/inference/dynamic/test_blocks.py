"""Blocks are conserved, and found again by the texts that they hold, whatever happens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainyard.inference.dynamic.blocks import NO_TEXT, BlockPool, Digest, digest_of

NUM_BLOCKS, SIZE = 12, 2


class Texts(RuleBasedStateMachine):
    """Texts of one or two kinds of blocks come, grow, fork and go. The model: what every text
    holds, as lists, and what was last published in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.texts: list[list[int]] = []
        self.digests: list[list[Digest]] = []
        self.content: dict[int, Digest] = {}

    @property
    def held(self) -> Counter[int]:
        return Counter(block for text in self.texts for block in text)

    @rule(parts=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def begin(self, parts: list[int]) -> None:
        digests: list[Digest] = []
        for part in parts:
            digests.append(digest_of(digests[-1] if digests else NO_TEXT, [part] * SIZE))
        found = self.pool.find(digests)
        assert [self.content[block] for block in found] == digests[: len(found)]
        if len(found) < len(digests):
            assert digests[len(found)] not in self.pool._block
        revived = sum(self.held[block] == 0 for block in found)
        if len(parts) - len(found) + revived > self.pool.num_free:
            return
        self.pool.share(found)
        own = self.pool.take(len(parts) - len(found))
        assert not set(own) & set(self.held)
        assert not set(own) & set(found)
        self.texts.append([*found, *own])
        self.digests.append(digests)
        for block, digest in zip(own, digests[len(found) :], strict=True):
            self.content.pop(block, None)
            if digest not in self.content.values():
                self.content[block] = digest
            self.pool.publish(block, digest)

    @precondition(lambda self: self.texts)
    @rule(choice=st.integers(0, 2**16))
    def end(self, choice: int) -> None:
        place = choice % len(self.texts)
        self.pool.release(self.texts.pop(place))
        del self.digests[place]

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, NUM_BLOCKS))
    def take_unnamed(self, count: int) -> None:
        blocks = self.pool.take(min(count, self.pool.num_free))
        for block in blocks:
            self.content.pop(block, None)
        self.texts.append(blocks)
        self.digests.append([])

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        self.pool.check()
        held = self.held
        assert [self.pool.holders(block) for block in range(NUM_BLOCKS)] == [
            held[block] for block in range(NUM_BLOCKS)
        ]
        assert self.pool.num_used == len(held)
        assert self.pool._digest == self.content


def run_machine(examples: int, steps: int) -> None:
    case = Texts.TestCase()
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None
    )
    case.runTest()


def test_blocks_are_conserved_under_random_operations() -> None:
    run_machine(4, 30)


@pytest.mark.full
def test_blocks_are_conserved_under_a_million_random_operations() -> None:
    run_machine(5000, 200)


def test_the_end_of_a_text_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    digests = [digest_of(NO_TEXT, [1, 2])]
    digests.append(digest_of(digests[0], [3, 4]))
    pool.publish(first, digests[0])
    pool.publish(second, digests[1])
    pool.release([first, second])
    assert pool.find(digests) == [first, second]
    pool.take(3)
    assert pool.find(digests) == [first], "blocks without a known text go first, then the end"


def test_a_pool_that_keeps_no_texts_finds_none() -> None:
    pool = BlockPool(2, keeps_texts=False)
    (block,) = pool.take(1)
    pool.publish(block, digest_of(NO_TEXT, [1]))
    assert pool.find([digest_of(NO_TEXT, [1])]) == []


def test_digests_name_all_tokens_before_them() -> None:
    one, other = digest_of(NO_TEXT, [1, 2]), digest_of(NO_TEXT, [2, 1])
    assert one != other
    assert digest_of(one, [3, 4]) != digest_of(other, [3, 4])
    assert digest_of(NO_TEXT, [1, 2]) == one
