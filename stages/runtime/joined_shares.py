"""Shares of a fan-out: each is an artifact, and all are of the same inputs, options and code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from stages.runtime.context import StageRun
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import parent
from trainyard.errors import ArtifactError

SHOWN = 8


def share_manifests(stage: StageRun, shares: Sequence[Output], program: str) -> list[Manifest]:
    """The manifest of each share, in order. program: the stage that makes them.

    Raises ArtifactError for missing shares, and for those of other inputs, options or code."""
    found = [read_manifest(share.manifest_url) for share in shares]
    missing = [rank for rank, one in enumerate(found) if one is None]
    if missing:
        raise ArtifactError(_unfit(shares, missing, "not made yet", program))
    manifests = [one[0] for one in found if one is not None]
    of_others = [rank for rank, one in enumerate(manifests) if one.lineage != stage.lineage]
    if of_others:
        why = "made of other inputs or other options"
        raise ArtifactError(_unfit(shares, of_others, why, program))
    older = [rank for rank, one in enumerate(manifests) if one.code.get("digest") != stage.code]
    if older:
        raise ArtifactError(_unfit(shares, older, "made of another code", program))
    return manifests


def _unfit(shares: Sequence[Output], ranks: Sequence[int], why: str, program: str) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    rest = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    command = shlex.join([*sys.argv[1:], "--rank", str(ranks[0])])
    return (
        f"{parent(shares[0].url)}: of {len(shares)} shares, those of rank {shown}{rest} are "
        f"{why}; run each, then this again: python -m stages.{program} {command}"
    )
