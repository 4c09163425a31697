"""Updates with moments that are kept in fewer bits between steps (--exp-avg-dtype)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.update import FlatRule, UpdateRule, UpdateTerms

log = logging.getLogger(__name__)

PART = 1 << 24
"""Numbers whose moments are widened at once, unless a single tensor has more: 64 MiB a moment."""


class NarrowMoments:
    """A rule whose moments are widened for its update and rounded to nearest even after it.

    The update itself sees moments that are not rounded yet, as a flat rule, which rounds when it
    stores, does."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self.moments: tuple[str, ...] = rule.moments
        self.flat: FlatRule | None = rule.flat

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        terms: UpdateTerms,
    ) -> None:
        """One step for all of them."""
        for part in _parts(params):
            kept = [held[part] for held in moments]
            wide = [
                [moment.to(param.dtype) for moment, param in zip(held, params[part], strict=True)]
                for held in kept
            ]
            self._rule.update(params[part], grads[part], wide, terms)
            for narrow, widened in zip(kept, wide, strict=True):
                torch._foreach_copy_(narrow, widened)


def _parts(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Runs of tensors of at most `PART` numbers, or of one."""
    begin, size = 0, 0
    for place, tensor in enumerate(tensors):
        if place > begin and size + tensor.numel() > PART:
            yield slice(begin, place)
            begin, size = place, 0
        size += tensor.numel()
    if begin < len(tensors):
        yield slice(begin, len(tensors))


BFLOAT16_STEP = 2.0**-8
"""Half the largest relative distance of neighbouring bfloat16 numbers: less is rounded away."""


def report_moments(precision: PrecisionConfig, beta2: float, *, say: bool = True) -> None:
    """Log the formats of moments that are not fp32, and warn of a second moment that freezes."""
    formats = precision.moment_formats
    if not formats or not say:
        return
    log.info("moments %s", " ".join(f"{name}={kept}" for name, kept in formats.items()))
    if "exp_avg_sq" in formats and 1.0 - beta2 < BFLOAT16_STEP:
        log.warning(
            "--exp-avg-sq-dtype bf16 and --adam-beta2 %g: a second moment that shrinks by %.2g of "
            "itself in a step is rounded back to what it was, so it can only grow; give at most "
            "--adam-beta2 0.99, or leave the second moment in fp32",
            *(beta2, 1.0 - beta2),
        )
