"""Seeds of dropout, as a function of run seed, step and position of the micro-batch.

The generators are seeded for every micro-batch, so no generator state is saved: a resumed run draws
the same numbers, and so does a run on another number of ranks. Dropout on the residual stream
hashes the same seeds (parallel/invariant_dropout.py). Standard library only, for
stages.certify."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of one micro-batch; `microbatch` counts over the global batch of all ranks."""
    return microbatch_seeds(seed, step, (microbatch,))[0]


def microbatch_seeds(seed: int, step: int, microbatches: Iterable[int]) -> list[int]:
    """The seeds of several micro-batches of a step."""
    begun = hashlib.blake2b(f"trainyard:{seed}:{step}:".encode(), digest_size=8)
    digests = []
    for place in microbatches:
        digest = begun.copy()
        digest.update(b"%d" % place)
        digests.append(digest.digest())
    numbers = struct.unpack(f"<{len(digests)}Q", b"".join(digests))
    return [number & (2**63 - 1) for number in numbers]


def generator_seed(seed: int, tp_rank: int, cp_rank: int, chunk: int) -> int:
    """The seed of a rank's generators for one chunk of the micro-batch with this seed."""
    return (seed + 1_000_003 * tp_rank + 7_919 * cp_rank + 104_729 * chunk) % 2**63


def step_digest(seed: int, step: int, num_microbatches: int) -> str:
    """Digest of the seeds of a step's micro-batches, over all ranks: of their number, the first and
    the last one, since the run's seed and their places determine those between."""
    first, last = microbatch_seeds(seed, step, (0, num_microbatches - 1))
    return _digest((num_microbatches, first, last))


def digest_of_every_seed(seed: int, step: int, num_microbatches: int) -> str:
    """The digest in the ledgers of earlier versions, some 2 us a micro-batch."""
    return _digest(microbatch_seeds(seed, step, range(num_microbatches)))


def _digest(numbers: Iterable[int]) -> str:
    return hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).hexdigest()
