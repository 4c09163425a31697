"""Lines of JSON as bytes: whether each is a plain document, and which bytes are in tokens of its
text.

Machine code. A bit for each byte says whether it is part of a token; the tokens are those of
`prefilter`. What this module calls plain, orjson reads, and gives the same text."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainyard.machine_code import compiled_inside, machine_code, zeros_below

PAD = 128
"""Zeros behind the bytes."""
BEGIN, END, TEXT, TEXT_END, CHARS, FLAGS = range(6)
"""Columns of lines: where one begins and ends, where its text does, its characters, and facts."""
HAS_ORIGIN, HAS_ESCAPE = 1, 2
NOT_PLAIN = -1

LETTERS = 1 << 16
"""Bits for codes of letters, of which the lowest 16 bits count."""
MAX_DEPTH = 60
"""Objects and arrays in each other; more are not plain."""
MAX_DIGITS = 24
"""Characters of a number; a longer one is not plain, nor one with an exponent."""

SPLIT_ID = np.frombuffer(b"split_id", np.uint8)
ORIGIN = np.frombuffer(b"origin", np.uint8)
TRUE, FALSE, NULL = (np.frombuffer(word, np.uint8) for word in (b"true", b"false", b"null"))
ZERO, ONE, ALL = np.uint64(0), np.uint64(1), np.uint64((1 << 64) - 1)
SHORT_ESCAPES = np.packbits([n in b'"\\/bfnrt' for n in range(256)], bitorder="little").view("<u8")
"""Bits of the bytes that an escape of two bytes ends with."""
LOW_BITS = np.uint64(0x0101010101010101)
GATHER = np.uint64(0x0102040810204080)
"""Moves the lowest bits of eight bytes into the highest byte."""

Bytes = Any
"""(n,) u8, contiguous."""
Bits = Any
"""(n / 64,) u64; byte n is bit n % 64 of number n / 64."""


@machine_code("void(u1[::1], u1[::1], u8[::1], u8[::1], u8[::1], u1)")
def mark(
    data: Bytes, kinds: Bytes, eights: Bits, token: Bits, special: Bits, no_token: int
) -> None:
    """Set the bits of bytes: of those in tokens, and of those that end a run of plain characters
    of a string. kinds: (as data) to write to; eights: the same memory as u64. no_token: a letter
    that is in no token."""
    for i in range(len(kinds)):
        byte = data[i]
        low = np.uint8(byte | np.uint8(0x20))
        is_letter = (np.uint8(low - np.uint8(97)) < np.uint8(26)) & (low != no_token)
        is_digit = np.uint8(byte - np.uint8(48)) < np.uint8(10)
        is_special = np.uint8(byte - np.uint8(32)) >= np.uint8(96)  # a control, or beyond ASCII
        is_special |= (byte == np.uint8(34)) | (byte == np.uint8(92))
        is_token = is_letter | is_digit | (byte == np.uint8(95))
        kinds[i] = np.uint8(is_token) | np.uint8(np.uint8(is_special) << np.uint8(1))
    for n in range(len(token)):
        tokens, specials = ZERO, ZERO
        for group in range(8):
            eight, place = eights[8 * n + group], np.uint64(8 * group)
            tokens |= (((eight & LOW_BITS) * GATHER) >> np.uint64(56)) << place
            specials |= ((((eight >> ONE) & LOW_BITS) * GATHER) >> np.uint64(56)) << place
        token[n], special[n] = tokens, specials


@compiled_inside
def _clear(bits: Bits, begin: int, end: int) -> None:
    """Clear the bits of some bytes."""
    if begin >= end:
        return
    first, last = begin >> 6, (end - 1) >> 6
    keep_first = (ONE << np.uint64(begin & 63)) - ONE
    keep_last = ~(ALL >> np.uint64(63 - ((end - 1) & 63)))
    if first == last:
        bits[first] &= keep_first | keep_last
        return
    bits[first] &= keep_first
    for n in range(first + 1, last):
        bits[n] = ZERO
    bits[last] &= keep_last


@compiled_inside
def _hex4(data: Bytes, at: int) -> int:
    """The number that four hexadecimal digits are; negative: they are not."""
    found = 0
    for i in range(at, at + 4):
        byte: Any = np.int64(data[i])
        low = byte | 0x20
        if 48 <= byte <= 57:
            found = found * 16 + byte - 48
        elif 97 <= low <= 102:
            found = found * 16 + low - 87
        else:
            return -1
    return found


@compiled_inside
def _is_short_escape(kind: Any) -> bool:
    """Whether a backslash before this byte is an escape of two bytes."""
    return bool(SHORT_ESCAPES[kind >> 6] >> np.uint64(kind & 63) & ONE == ONE)


@compiled_inside
def _escape(data: Bytes, at: int) -> tuple[int, int]:
    """(bytes of the long escape that begins here, code of its character); 0 bytes: it is wrong, or
    a letter or digit that could stand as it is."""
    if data[at + 1] != 117:  # u
        return 0, 0
    code = _hex4(data, at + 2)
    if code < 0x80:
        low = code | 0x20
        is_word = 48 <= code <= 57 or 97 <= low <= 122 or code == 95
        return (0 if code < 0 or is_word else 6), code
    if code < 0xD800 or code >= 0xE000:
        return 6, code
    if code >= 0xDC00 or data[at + 6] != 92 or data[at + 7] != 117:
        return 0, 0
    second = _hex4(data, at + 8)
    if second < 0xDC00 or second >= 0xE000:
        return 0, 0
    return 12, 0x10000 + ((code & 0x3FF) << 10 | second & 0x3FF)


@compiled_inside
def _utf8(data: Bytes, at: int) -> tuple[int, int]:
    """(bytes of the character beyond ASCII that begins here, its code); 0 bytes: it is none
    (RFC 3629)."""
    first: Any = np.int64(data[at])
    second: Any = np.int64(data[at + 1]) ^ 0x80
    third: Any = np.int64(data[at + 2]) ^ 0x80
    fourth: Any = np.int64(data[at + 3]) ^ 0x80  # each below 64, if it continues a character
    code: Any = 0
    if first < 0xE0:
        code = first << 6 & 0x7C0 | second
        return (2 if (first >= 0xC2) & (second < 64) else 0), code
    if first < 0xF0:
        code = first << 12 & 0xF000 | second << 6 | third
        is_right = ((second | third) < 64) & (code >= 0x800) & (code >> 11 != 0x1B)  # a surrogate
        return (3 if is_right else 0), code
    code = first << 18 & 0x1C0000 | second << 12 | third << 6 | fourth
    is_right = ((second | third | fourth) < 64) & (code >= 0x10000) & (code <= 0x10FFFF)
    return (4 if is_right & (first < 0xF8) else 0), code


@compiled_inside
def _string(
    data: Bytes, token: Bits, special: Bits, letters: Bits, rare: Any, at: int
) -> tuple[int, int, int]:
    """(where the string ends whose first character is here, how many more bytes than characters it
    has, whether it has an escape); no token has a byte of one. NOT_PLAIN: it does not end, or is
    wrong."""
    more, facts = 0, 0
    while True:
        word = at >> 6
        left = special[word] >> np.uint64(at & 63)
        if left == ZERO:
            word += 1
            while special[word] == ZERO:
                word += 1
            at, left = word << 6, special[word]
        at += zeros_below(left)
        byte = data[at]
        if byte == 34:
            return at, more, facts
        if byte == 92:
            facts |= HAS_ESCAPE
            if _is_short_escape(data[at + 1]):  # most are line feeds
                token[at + 1 >> 6] &= ~(ONE << np.uint64(at + 1 & 63))
                more, at = more + 1, at + 2
                continue
            size, code = _escape(data, at)
            _clear(token, at, at + size)
        else:
            size, code = _utf8(data, at)
        if size == 0:
            return NOT_PLAIN, 0, 0
        place = code & LETTERS - 1
        if letters[place >> 6] >> np.uint64(place & 63) & ONE != ZERO:
            rare[0] += 1
            rare[rare[0]] = at
        more += size - 1
        at += size


@compiled_inside
def _number(data: Bytes, begin: int) -> int:
    """Where the number ends that begins here."""
    at = begin + 1 if data[begin] == 45 else begin
    first = at
    while 48 <= data[at] <= 57:
        at += 1
    if at == first or (data[first] == 48 and at > first + 1):
        return NOT_PLAIN
    if data[at] == 46:
        point = at
        at += 1
        while 48 <= data[at] <= 57:
            at += 1
        if at == point + 1:
            return NOT_PLAIN
    return NOT_PLAIN if at - begin > MAX_DIGITS else at


@compiled_inside
def _is(data: Bytes, begin: int, end: int, name: Bytes) -> bool:
    if end - begin != len(name):
        return False
    for i in range(len(name)):  # noqa: SIM110  # numba has no generators here
        if data[begin + i] != name[i]:
            return False
    return True


VALUE, VALUE_OR_END, KEY, KEY_OR_END, AFTER_VALUE = range(5)
"""What may come next."""


@compiled_inside
def _line(
    data: Bytes,
    token: Bits,
    special: Bits,
    letters: Bits,
    rare: Any,
    begin: int,
    key: Bytes,
    text: Any,
) -> tuple[int, int, int]:
    """(where the line ends that begins here, characters of its text, facts). text: (2,) i8, gets
    where that is. NOT_PLAIN: it is no object of one text under the key, or one that must be read:
    of more strings that are the key, with a split id, deep, with escapes in its keys."""
    if data[begin] != 123:
        return NOT_PLAIN, 0, 0
    at, depth, objects, state = begin + 1, 1, ONE, KEY_OR_END
    facts, chars, num_keys, is_text = 0, NOT_PLAIN, 0, False
    while depth > 0:
        byte = data[at]
        if byte == 32 or byte == 9 or byte == 13:
            at += 1
        elif state == AFTER_VALUE:
            in_object = objects & ONE == ONE
            if byte == 44:
                state = KEY if in_object else VALUE
            elif byte == (125 if in_object else 93):
                depth, objects = depth - 1, objects >> ONE
            else:
                return NOT_PLAIN, 0, 0
            at += 1
        elif byte == 34:
            end, more, found = _string(data, token, special, letters, rare, at + 1)
            if end < 0:
                return NOT_PLAIN, 0, 0
            if _is(data, at + 1, end, key):
                num_keys += 1
            if state in (KEY, KEY_OR_END):
                if depth == 1:
                    if found & HAS_ESCAPE or _is(data, at + 1, end, SPLIT_ID):
                        return NOT_PLAIN, 0, 0
                    is_text = _is(data, at + 1, end, key)
                    if _is(data, at + 1, end, ORIGIN):
                        facts |= HAS_ORIGIN
                at = end + 1
                while data[at] == 32 or data[at] == 9 or data[at] == 13:
                    at += 1
                if data[at] != 58:
                    return NOT_PLAIN, 0, 0
                state = VALUE
            else:
                if is_text:
                    text[0], text[1] = at + 1, end
                    chars, is_text = end - at - 1 - more, False
                at, state = end, AFTER_VALUE
            at += 1
        elif state == KEY or is_text:
            return NOT_PLAIN, 0, 0
        elif state == KEY_OR_END:
            if byte != 125:
                return NOT_PLAIN, 0, 0
            depth, objects, state, at = depth - 1, objects >> ONE, AFTER_VALUE, at + 1
        elif byte == 93 and state == VALUE_OR_END:
            depth, objects, state, at = depth - 1, objects >> ONE, AFTER_VALUE, at + 1
        elif byte == 123 or byte == 91:
            if depth == MAX_DEPTH:
                return NOT_PLAIN, 0, 0
            objects = objects << ONE | (ONE if byte == 123 else ZERO)
            depth, state, at = depth + 1, KEY_OR_END if byte == 123 else VALUE_OR_END, at + 1
        elif _is(data, at, at + 4, TRUE) or _is(data, at, at + 4, NULL):
            at, state = at + 4, AFTER_VALUE
        elif _is(data, at, at + 5, FALSE):
            at, state = at + 5, AFTER_VALUE
        else:
            at, state = _number(data, at), AFTER_VALUE
            if at < 0:
                return NOT_PLAIN, 0, 0
    return (at if data[at] == 10 and num_keys == 1 and chars >= 0 else NOT_PLAIN), chars, facts


@machine_code(
    "i8(u1[::1], u8[::1], u8[::1], u8[::1], i8[::1], i8[::1], i8, u1[::1], i8[:, ::1], i8)"
)
def read_lines(
    data: Bytes,
    token: Bits,
    special: Bits,
    letters: Bits,
    rare: Any,
    text: Any,
    size: int,
    key: Bytes,
    lines: Any,
    most: int,
) -> int:
    """How many lines there are, or NOT_PLAIN. lines: (at least that, 6) to write to. Their last
    line feed is at `size`. Only the tokens of texts remain. letters: bits of those that are rare.
    rare: to write to, how many of them strings have, and where. text: (2,), to write to, too.
    most: bytes of a line."""
    at, count, last, rare[0] = 0, 0, 0, 0
    while at <= size:
        end, chars, facts = _line(data, token, special, letters, rare, at, key, text)
        if end < 0 or end - at > most:
            return NOT_PLAIN
        _clear(token, last, text[0])
        last = text[1]
        row = lines[count]
        row[BEGIN], row[END], row[TEXT], row[TEXT_END] = at, end, text[0], text[1]
        row[CHARS], row[FLAGS] = chars, facts
        at, count = end + 1, count + 1
    _clear(token, last, len(token) << 6)
    return count
