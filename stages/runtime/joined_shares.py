"""Shares of a fan-out: each is an artifact, and all are of the same inputs, options and code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stages.runtime.context import StageRun
from trainyard.artifacts.inputs import NUM_THREADS
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import parent
from trainyard.errors import ArtifactError

S = TypeVar("S")
T = TypeVar("T")

SHOWN = 8

OTHER_CODE = "made of another code"


def share_manifests(
    stage: StageRun,
    shares: Sequence[Output],
    program: str,
    other: Callable[[Manifest], str | None] | None = None,
) -> list[Manifest]:
    """The manifest of each share, in order. program: the stage that makes them. other: says of what
    else a share is made, if of anything.

    Raises ArtifactError for missing shares, and for those of other inputs, options or code."""
    found = check_all_made(shares, read_all(shares), program)
    reasons = [(other and other(one)) or _difference(one, stage) for one in found]
    why = next(filter(None, reasons), None)
    if why is not None:
        ranks = [rank for rank, reason in enumerate(reasons) if reason == why]
        raise ArtifactError(_unfit(shares, ranks, why, program))
    return found


def _difference(share: Manifest, stage: StageRun) -> str | None:
    """How a share differs from what this run would make; None if it does not."""
    if share.lineage != (stage.shares_lineage or stage.lineage):
        return "made of other inputs or other options"
    return OTHER_CODE if share.code.get("digest") != stage.code else None


def read_all(shares: Sequence[Output]) -> list[Manifest | None]:
    """The manifests of shares."""
    found = several_at_once(lambda share: read_manifest(share.manifest_url), shares)
    return [one[0] if one is not None else None for one in found]


def several_at_once(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The results of `work`, in threads: each may be a question to a far store."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shares") as threads:
        return list(threads.map(work, items))


def check_all_made(
    shares: Sequence[Output], found: Sequence[Manifest | None], program: str
) -> list[Manifest]:
    """These manifests; ArtifactError if some are missing."""
    missing = [rank for rank, one in enumerate(found) if one is None]
    if missing:
        raise ArtifactError(_unfit(shares, missing, "not made yet", program))
    return [one for one in found if one is not None]


def check_all_list(
    shares: Sequence[Output], found: Sequence[Manifest], name: str, program: str
) -> None:
    """Refuse shares whose manifests lack a file that the present code always writes."""
    lacking = [rank for rank, one in enumerate(found) if one.record(name) is None]
    if lacking:
        raise ArtifactError(_unfit(shares, lacking, OTHER_CODE, program))


def _unfit(shares: Sequence[Output], ranks: Sequence[int], why: str, program: str) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    rest = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    command = shlex.join([*sys.argv[1:], "--rank", str(ranks[0])])
    return (
        f"{parent(shares[0].url)}: of {len(shares)} shares, those of rank {shown}{rest} are "
        f"{why}; run each, then this again: python -m stages.{program} {command}"
    )
