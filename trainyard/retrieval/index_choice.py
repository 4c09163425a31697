"""The index that is built when no --retro-index-str is given, and how many vectors a given one
needs for its training. Pure arithmetic, without faiss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trainyard.errors import ConfigError

AUTO = "auto"
"""As --retro-index-str: the index is chosen by the number of vectors."""

SMALL = 20_000
"""Vectors among which exact search takes a millisecond or two."""

BYTE_CODES = 8 << 30
"""Up to this size of all vectors at one byte a dimension, the index keeps them so; beyond, it
keeps product codes of 64 bytes."""

MOST_LISTS = 1 << 22
"""Lists of the largest index in use for Retro (InstructRetro: IVF4194304)."""

GRAPH_LISTS = 1 << 14
"""From this many lists on, a graph (HNSW) finds the nearest ones; fewer are compared one by one."""

POINTS_PER_LIST = 39
"""Training vectors that faiss wants for each list at least."""

MOST_POINTS_PER_LIST = 256
"""Training vectors for each list that faiss uses at most."""

_LISTS = re.compile(r"(?:^|,)\s*IVF(\d+)([kM]?)|(?:^|,)\s*IMI(\d+)x(\d+)")


def num_lists(index_str: str | None) -> int:
    """Lists of an inverted file by its factory string; 0 for any other index, and for one that is
    still to be chosen."""
    found = _LISTS.search(index_str or AUTO)
    if found is None:
        return 0
    plain, unit, parts, bits = found.groups()
    if plain is not None:
        return int(plain) << {"": 0, "k": 10, "M": 20}[unit]
    return 1 << min(int(parts) * int(bits), 62)


def check_points(index_str: str | None, num_training: int, source: str, remedy: str) -> None:
    """Refuse an index with more lists than so many training vectors suffice for.

    source: the option or file that says how many there are. remedy: how there can be more."""
    lists = num_lists(index_str)
    needed = lists * POINTS_PER_LIST
    if num_training < needed:
        fitting = max(num_training // POINTS_PER_LIST, 1)
        raise ConfigError(
            f"--retro-index-str {index_str}: its {lists:,} lists need {needed:,} training vectors "
            f"({POINTS_PER_LIST} each), and {source} gives {num_training:,}; {remedy}, or give an "
            f"index of at most {fitting:,} lists, or none for one that fits"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """An index by faiss's factory string, and why."""

    index_str: str
    reason: str


def choose_index(num_vectors: int, dimensions: int, num_training: int) -> Choice:
    """A default for an index that is to hold `num_vectors`, trained on `num_training` of them."""
    if num_vectors < SMALL:
        return Choice("Flat", f"{num_vectors:,} vectors are few enough for exact search")
    wanted = 4 * math.sqrt(num_vectors)
    trainable = num_training / POINTS_PER_LIST
    lists = 1 << max(int(math.log2(max(min(wanted, trainable, MOST_LISTS), 1))), 0)
    why = f"{lists:,} lists: a power of two up to 4 x sqrt({num_vectors:,} vectors)"
    if trainable < wanted:
        why += f", and {num_training:,} training vectors suffice for no more"
    coarse = f"IVF{lists}_HNSW32" if lists >= GRAPH_LISTS else f"IVF{lists}"
    size = num_vectors * dimensions
    if size <= BYTE_CODES:
        return Choice(f"{coarse},SQ8", f"{why}; a byte a dimension is {size / 1e9:,.2f} GB")
    bytes_each = min(64, dimensions)
    rotated = bytes_each * max(min(4, dimensions // bytes_each), 1)
    return Choice(
        f"OPQ{bytes_each}_{rotated},{coarse},PQ{bytes_each}",
        f"{why}; codes of {bytes_each} bytes, as a byte a dimension would be {size / 1e9:,.0f} GB",
    )
