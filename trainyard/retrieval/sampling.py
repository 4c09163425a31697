"""Which chunks train an index: pure functions of counts and a seed."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

SampleMode = Literal["uniform", "prefix"]


def sample_chunks(
    num_chunks: int, num_sampled: int, mode: SampleMode, seed: tuple[int, ...]
) -> NDArray[np.int64]:
    """(num_sampled,) ascending numbers of different chunks, below `num_chunks`.

    uniform: all subsets of this size are equally likely; needs up to 8 bytes of memory for each of
    the `num_chunks`. prefix: the first ones, as in Megatron-LM, whatever the corpus begins with."""
    if mode == "prefix":
        return np.arange(num_sampled)
    chosen = np.random.default_rng(seed).choice(num_chunks, num_sampled, False, shuffle=False)
    return np.sort(chosen)
