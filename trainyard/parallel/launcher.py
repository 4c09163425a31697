"""What a launcher such as torchrun tells each rank, in environment variables. No torch."""

from __future__ import annotations

import os

from trainyard.errors import ConfigError

HINT = "torchrun sets it; start with torchrun or --nproc-per-node, or unset it"

MAX_PORT = 65535


def rank_of_environment() -> tuple[int, int, int, int]:
    """(rank, ranks, local rank, local ranks) that a launcher set, or one process alone.

    Raises ConfigError for values that no launcher sets."""
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank, local_world = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    _check_below("RANK", rank, "WORLD_SIZE", world)
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
    return rank, world, local_rank, local_world


def address_of_environment() -> tuple[str, int]:
    """(address, port) of the first rank. Raises ConfigError if they are missing or no address."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')} and {' and '.join(missing)} not set: "
            "ranks do not know where to meet; start with --nproc-per-node or torchrun, or set "
            "MASTER_ADDR and MASTER_PORT to those of the first rank's machine"
        )
    port = _number("MASTER_PORT", 0)
    if not 0 < port <= MAX_PORT:
        raise ConfigError(
            f"MASTER_PORT={port} is not a port: choose a free one from 1024 to {MAX_PORT}, the "
            "same for all ranks"
        )
    return os.environ["MASTER_ADDR"], port


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"the variable {name}={text[:50]!r} is not a whole number: {HINT}")
    return int(text)


def _check_below(name: str, rank: int, of: str, count: int) -> None:
    if count < 1:
        raise ConfigError(f"the variable {of}={count} must be at least 1: {HINT}")
    if rank >= count:
        raise ConfigError(
            f"the variable {name}={rank} must be below {of}={count}, as ranks count from 0: {HINT}"
        )
