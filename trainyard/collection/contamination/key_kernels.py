"""Where in a text the keys of `prefilter` may be, by the bits that say which bytes are in tokens.

Machine code. Knows nothing of JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainyard.collection.contamination.byte_kernels import ALL, ONE, ZERO, Bits, Bytes
from trainyard.machine_code import compiled_inside, machine_code, zeros_below

LOWER_CASE = np.uint64(0x2020202020202020)
STEPS = 4
"""Pairs of tokens in the longest key."""
VALUE_BYTES = 8
"""Of a token that count, as in `prefilter`."""


@compiled_inside
def _begins(token: Bits, n: Any, least: int) -> Any:
    """Bits of the bytes of word n at which tokens of at least so many bytes begin."""
    bits, following = token[n], token[n + ONE]
    carry = token[n - ONE] >> np.uint64(63) if n > ZERO else ZERO
    begins = bits & ~(bits << ONE | carry)
    for more in range(1, least):
        begins &= bits >> np.uint64(more) | following << np.uint64(64 - more)
    return begins


@compiled_inside
def _value(windows: Bytes, token: Bits, n: Any, bit: Any, multiplier: Any) -> Any:
    """That of the token which begins at a byte of word n, by its first bytes. Without branches,
    which a processor could not foresee."""
    inside = token[n] >> bit | (token[n + ONE] << ONE) << (np.uint64(63) - bit)
    length = min(np.uint64(zeros_below(~inside)), np.uint64(VALUE_BYTES))
    value = windows[(n << np.uint64(6)) + bit] | LOWER_CASE
    value &= ALL >> (np.uint64(64) - (length << np.uint64(3)))
    value *= multiplier
    return value ^ value >> np.uint64(29)


WINDOWS = "Array(u8, 1, 'A', aligned=False)"


@machine_code(f"i8({WINDOWS}, u8[::1], i8, u8, i8, u8[::1], u8, i8[::1], u8[::1])")
def find_keys(
    windows: Bytes,
    token: Bits,
    least: int,
    multiplier: Any,
    first: int,
    table: Bits,
    shift: Any,
    near: Any,
    hashes: Any,
) -> np.int64:
    """How many keys may begin at a token of at least so many bytes; `near` gets where, and `hashes`
    those of their first tokens. windows: the eight bytes from each byte on, as u64. first: 2 or 4,
    how many tokens of a key are looked at. table: bits of their hashes, by slot. shift: where that
    begins in a hash."""
    # Unsigned: numba looks whether a signed index is negative.
    found, value, pair, before, one, two, three = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
    slots = np.uint64(len(table) * 64 - 1)
    weight = multiplier if first > 2 else ZERO
    for n in range(np.uint64(len(token) - 1)):
        begins = _begins(token, n, least)
        while begins != ZERO:
            bit = np.uint64(zeros_below(begins))
            begins &= begins - ONE
            previous, earlier, before = value, before, pair
            value = _value(windows, token, n, bit, multiplier)
            pair = previous * multiplier + value
            key = earlier * weight + pair
            slot = key >> shift & slots
            near[found], hashes[found] = three if first > 2 else one, key
            found += table[slot >> np.uint64(6)] >> (slot & np.uint64(63)) & ONE
            one, two, three = (n << np.uint64(6)) + bit, one, two
    return np.int64(found)


@machine_code(f"void({WINDOWS}, u8[::1], i8, u8, i8[::1], u8[:, ::1])")
def hash_keys(
    windows: Bytes, token: Bits, least: int, multiplier: Any, places: Any, hashes: Any
) -> None:
    """Hash the tokens from each place on, as `prefilter` does. Column n of `hashes` gets that of
    the first 2n + 2 tokens; behind the last token, any."""
    for i in range(len(places)):
        at = np.uint64(places[i])
        n = at >> np.uint64(6)
        begins = _begins(token, n, least) & ALL << (at & np.uint64(63))
        value, key = ZERO, ZERO
        for number in range(2 * STEPS):
            while begins == ZERO and n < np.uint64(len(token) - 2):
                n += ONE
                begins = _begins(token, n, least)
            if begins == ZERO:
                break
            bit = np.uint64(zeros_below(begins))
            begins &= begins - ONE
            previous, value = value, _value(windows, token, n, bit, multiplier)
            if number & 1 == 1:
                key = key * multiplier + (previous * multiplier + value)
                hashes[i, number >> 1] = key
