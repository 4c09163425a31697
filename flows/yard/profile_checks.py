"""What the tables of a yard profile cannot say together: each is refused by its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.recipes.stage_job import CONFIGS
from flows.yard.links import check_browse
from flows.yard.place import POLLING, SCHEDULED, SHARING
from flows.yard.tables import refuse_unknown
from trainyard.errors import ConfigError

if TYPE_CHECKING:
    from flows.yard.profile import Profile

CAN_BE_SHARED = ("tokenize",)
"""Stages whose output several jobs can make together, and one joins."""


def check_tables(profile: Profile) -> None:
    """ConfigError for tables that do not go together, or name a stage that is none."""
    _check_stages(profile)
    _check_watch(profile)
    _check_shares(profile)
    _check_memory(profile)
    check_browse(profile.browse)
    if profile.block == "process":
        _check_process(profile)
    if profile.fruitless_attempts < 1:
        raise ConfigError(
            f"fruitless_attempts must be at least 1, got {profile.fruitless_attempts}"
        )


def _check_stages(profile: Profile) -> None:
    refuse_unknown(profile.images, CONFIGS, "[images]")
    refuse_unknown(profile.resources_by_stage, CONFIGS, "[resources]")
    refuse_unknown(profile.watch_by_stage, CONFIGS, "[watch]")
    refuse_unknown(profile.limits, CONFIGS, "[limits]")
    refuse_unknown(profile.shares, CAN_BE_SHARED, "[shares]")
    for name, table in (("limits", profile.limits), ("shares", profile.shares)):
        for stage, count in table.items():
            if count < 1:
                raise ConfigError(f"[{name}] {stage} must be at least 1, got {count}")


def _check_shares(profile: Profile) -> None:
    if profile.shares and profile.block not in SHARING:
        raise ConfigError(
            f"[shares] are for a block with a scheduler, {' or '.join(SHARING)}; block "
            f"{profile.block!r} has none, and `workers` of the stage use the cores of one machine"
        )
    if profile.shares_at_once is not None and profile.shares_at_once < 1:
        raise ConfigError(
            f"shares_at_once must be at least 1, or left out, got {profile.shares_at_once}"
        )


def _check_process(profile: Profile) -> None:
    """What a process of this machine has not, and nobody would heed."""
    wanted = (profile.resources, *profile.resources_by_stage.values())
    if any(one.num_processes > 1 for one in wanted):
        raise ConfigError(
            "[resources]: block 'process' starts one process; a training starts its ranks on "
            "this machine itself, with nproc_per_node in the recipe's [pretrain]"
        )
    for key in ("image", "images", "mounts"):
        if getattr(profile, key):
            raise ConfigError(
                f"{key}: block 'process' runs what is installed here and starts no container; "
                f'leave it out, or choose block = "container"'
            )


def _check_memory(profile: Profile) -> None:
    memory = profile.gpu_memory_gib
    if memory is None:
        return
    if memory <= 0:
        raise ConfigError(f"gpu_memory_gib must be positive, got {memory}")
    # A process takes the GPUs of its machine, and nobody has to ask for them.
    if profile.block != "process" and not profile.resources_of("pretrain").gpus_per_node:
        raise ConfigError(
            f"gpu_memory_gib ({memory:g}) is what a GPU of a training has, and here a training "
            f"gets none: say gpus_per_node in [resources.pretrain], or leave gpu_memory_gib out"
        )


def _check_watch(profile: Profile) -> None:
    for name, blocks in (("hang_seconds", SCHEDULED), ("poll_seconds", POLLING)):
        wanted = (profile.watch, *profile.watch_by_stage.values())
        if profile.block not in blocks and any(getattr(one, name) is not None for one in wanted):
            raise ConfigError(
                f"[watch] {name} is for block {', '.join(blocks)}; block {profile.block!r} does "
                f"not look that way: leave it out"
            )
