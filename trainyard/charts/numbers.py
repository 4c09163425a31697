"""Numbers as text for people. Pure functions; none of them shows NaN or infinity."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

NARROW = "\u202f"
MINUS = "\u2212"
TIMES = "\u00d7"
DOT = "\u00b7"

Format = Callable[[float], str]


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite float, or an int that is one when rounded."""
    kind = isinstance(value, int | float) and not isinstance(value, bool)
    return kind and -sys.float_info.max <= value <= sys.float_info.max


def whole(value: float) -> str:
    """1234567 as 1 234 567."""
    return f"{value:,.0f}".replace(",", NARROW)


def scaled(value: float) -> str:
    """Three digits and a unit of size: 3.41 M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{three(value / (1e3 if unit == 'k' else limit))}{NARROW}{unit}"
    return whole(value) if abs(value) >= 1000 or float(value).is_integer() else three(value)


def three(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 12)}f}"


def size(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{three(num_bytes / limit)}{NARROW}{unit}"
    return f"{num_bytes:.0f}{NARROW}B"


def duration(seconds: float) -> str:
    """The two largest units of seconds, minutes, hours and days."""
    if seconds < 9.95:
        return f"{seconds:.1f}{NARROW}s"
    total = round(seconds)
    if total < 60:
        return f"{total}{NARROW}s"
    parts = ((total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"))
    units = [(count, unit) for count, unit in (*parts, (total % 60, "s"))]
    first = next(index for index, (count, _) in enumerate(units) if count)
    shown = [f"{count}{NARROW}{unit}" for count, unit in units[first : first + 2] if count]
    return " ".join(shown)


def milliseconds(seconds: float) -> str:
    """A short time."""
    return f"{three(seconds * 1e3)}{NARROW}ms" if seconds < 1 else f"{three(seconds)}{NARROW}s"


def percent(share: float) -> str:
    """A share of 1, with one decimal."""
    return f"{100 * share:.1f} %"


def fixed(digits: int) -> Format:
    """A format with that many decimals."""
    return lambda value: f"{value:.{digits}f}".replace("-", MINUS)


def rate(value: float) -> str:
    """A learning rate: 0, 6e-4, 1.5e-5."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", MINUS)


def perplexity(value: float) -> str:
    """Three digits; whole above a hundred."""
    return whole(value) if value >= 100 else three(value)


def shown(value: Any) -> str:
    """An option or a metric of any type."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return whole(value) if abs(value) >= 10000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "not finite"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or "none"
    return str(value) if str(value) else "empty"


def bounded_exp(loss: float) -> float:
    """exp of a loss of at most 20, so that it does not overflow."""
    return math.exp(min(loss, 20.0))
