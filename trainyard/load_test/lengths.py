"""How long prompts and outputs of a synthetic load are.

Pure functions of a distribution and a generator; knows nothing of texts or requests."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from trainyard.config import MAX_SIZE
from trainyard.errors import ConfigError

Kind = Literal["fixed", "uniform", "normal", "lognormal"]
KINDS: dict[str, int] = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}
"""How many numbers each distribution has."""

FORMS = "N, fixed:N, uniform:LOW:HIGH, normal:MEAN:STDDEV or lognormal:MEAN:STDDEV"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths in tokens, of which none is below 1."""

    kind: Kind
    first: float
    """The length, the least one of a uniform distribution, or the mean."""
    second: float = 0.0
    """The greatest length of a uniform distribution, included, or the standard deviation."""

    def sample(self, count: int, generator: random.Random) -> list[int]:
        """So many independent lengths, rounded, at least 1 and at most MAX_SIZE."""
        return [min(max(round(self._draw(generator)), 1), MAX_SIZE) for _ in range(count)]

    def _draw(self, generator: random.Random) -> float:
        if self.kind == "fixed":
            return self.first
        if self.kind == "uniform":
            return generator.randint(int(self.first), int(self.second))
        if self.kind == "normal":
            return generator.normalvariate(self.first, self.second)
        # Of the logarithm, so that the lengths themselves have this mean and deviation.
        variance = math.log1p((self.second / self.first) ** 2)
        mean = math.log(self.first) - variance / 2
        return generator.lognormvariate(mean, math.sqrt(variance))


def parse_lengths(text: str, option: str) -> LengthDistribution:
    """The distribution that a text of one of `FORMS` names. option: for the ConfigError."""
    words = text.split(":")
    kind, numbers = ("fixed", words) if len(words) == 1 else (words[0], words[1:])
    if kind not in KINDS or len(numbers) != KINDS[kind]:
        raise ConfigError(f"{option} {text!r} is no distribution of lengths; write {FORMS}")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= MAX_SIZE for value in values) or values[0] < 1:
        raise ConfigError(
            f"{option} {text!r}: lengths are numbers from 1 to {MAX_SIZE}, and a deviation may be 0"
        )
    if kind in ("fixed", "uniform") and not all(value.is_integer() for value in values):
        raise ConfigError(f"{option} {text!r}: lengths are whole numbers of tokens")
    if kind == "uniform" and values[0] > values[1]:
        raise ConfigError(f"{option} {text!r}: the least length comes first")
    return LengthDistribution(kind, *values)  # type: ignore[arg-type]
