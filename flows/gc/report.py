"""The report of a sweep: lines for a terminal, a table for Prefect's pages."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from flows.gc.sweep import Swept
from trainyard.logging import one_line

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size(value: int) -> str:
    """Bytes, for people."""
    for unit, name in UNITS:
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value} bytes"


def lines(swept: Swept, is_dry: bool) -> list[str]:
    """The lines of a report: what was found and why, what stays, and the sum."""
    return [one_line(line) for line in _lines(swept, is_dry)]


def _lines(swept: Swept, is_dry: bool) -> list[str]:
    report = [f"{one.kind}: {one.url}, {size(one.size_bytes)}: {one.why}" for one in _all(swept)]
    report += [f"kept: {place}: in use by {by}" for place, by in sorted(swept.plan.kept.items())]
    report += [f"left for the next sweep: {one.url}: {error}" for one, error in swept.left]
    report += [f"not checked: {error}" for error in swept.plan.unseen]
    report += [f"not removed: {one.url}: {error}" for one, error in swept.failed]
    count, total = len(swept.plan.garbage), size(swept.plan.size_bytes)
    if not count:
        return [*report, f"{swept.plan.root}: nothing to remove"]
    if is_dry:
        return [*report, f"{swept.plan.root}: {count} things, {total}, would be removed"]
    done = sum(one.size_bytes for one in swept.removed)
    return [*report, f"{swept.plan.root}: removed {len(swept.removed)} of {count}, {size(done)}"]


def rows(swept: Swept) -> list[dict[str, Any]]:
    """One row per kind."""
    found: dict[str, list[int]] = defaultdict(list)
    for one in swept.plan.garbage:
        found[one.kind].append(one.size_bytes)
    removed = [one.kind for one in swept.removed]
    return [
        {
            "kind": kind,
            "found": len(sizes),
            "size": size(sum(sizes)),
            "removed": removed.count(kind),
        }
        for kind, sizes in sorted(found.items())
    ]


def _all(swept: Swept) -> list[Any]:
    return sorted(swept.plan.garbage, key=lambda one: (one.kind, one.url))
