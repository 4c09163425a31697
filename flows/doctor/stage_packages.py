"""Check of the packages of Retro's stages, where stages are processes of this Python."""

from __future__ import annotations

import sys
from importlib import metadata

from flows.doctor.check import Check, CheckResult, fail, ok, skipped
from flows.doctor.context import YardContext
from flows.yard.profile import Profile
from flows.yard.stage_packages import HDF5, MODULES, SEARCH, how_to_install, missing
from trainyard.errors import ConfigError

FLOWS = ("build-retro", "pretrain-retro")
DISTRIBUTIONS = {HDF5: ("h5py",), SEARCH: ("faiss-cpu", "faiss-gpu")}


def retro(yard: YardContext) -> CheckResult:
    """h5py and faiss; they are missed only where the profile names a stage or a flow of Retro."""
    if not yard.runs_here:
        return skipped("stages have images or nodes of their own; each says what it misses")
    lacking = missing(DISTRIBUTIONS)
    if not lacking:
        return ok(", ".join(_version(module) for module in DISTRIBUTIONS))
    message = f"{sys.executable} has no {' and no '.join(lacking)}"
    wanted = named_in(yard.profile)
    if not wanted:
        return skipped(f"{message}, and the profile names no stage of Retro")
    todo = how_to_install(lacking)
    return fail(ConfigError, f"{message}, which {' and '.join(wanted)} of the profile need", todo)


def named_in(profile: Profile) -> list[str]:
    """Tables and lists of a profile that name stages or flows of Retro."""
    tables = {
        "resources": profile.resources_by_stage,
        "images": profile.images,
        "shares": profile.shares,
        "limits": profile.limits,
        "schedules": profile.schedules,
    }
    named = [f"[{table}.{name}]" for table, names in tables.items() for name in names
             if name in MODULES or name in FLOWS]  # fmt: skip
    return named + [f"deployment {name}" for name in profile.deployments if name in FLOWS]


def _version(module: str) -> str:
    for name in DISTRIBUTIONS[module]:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return module


CHECKS = (Check("Retro", retro, "packages-of-retro"),)
