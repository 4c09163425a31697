"""Tests whether ranks can train together: they connect, all-reduce, and report the bandwidth.

    python -m trainyard.parallel.probe --ranks 2       starts them here
    torchrun ... -m trainyard.parallel.probe           is one of them

Ranks connect as training does. The last line of the first rank is

    probe: {"machine": {...}, "backend": "nccl", "ranks": 2, "bytes_per_second": 1.5e11, ...}

or has the key "error". Exit status 0, 2 or 3, as a stage's."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from trainyard.errors import (
    CommunicationError,
    ConfigError,
    InfrastructureError,
    TrainyardError,
)
from trainyard.machine import inspect_machine

MARK = "probe: "

ELEMENTS = {"nccl": 64 << 20, "gloo": 1 << 20}
"""fp32 values that are reduced: enough to see the wire, and done in a moment."""

REPEATS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Be the ranks, or one of them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainyard.parallel.probe")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start here")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long ranks may take")
    parser.add_argument("--config", help=argparse.SUPPRESS)  # job blocks may hand one on
    given = parser.parse_args(argv)
    if "RANK" not in os.environ:
        return _start_ranks(given.ranks, given.seconds)
    try:
        found = _meet(given.seconds)
    except TrainyardError as error:
        _say({"error": str(error)})
        return error.exit_status
    if int(os.environ["RANK"]) == 0:
        _say(found)
    # NCCL's and gloo's threads may outlive Python and abort it. The report is printed, so exit
    # without cleanup.
    sys.stdout.flush()
    os._exit(0)


def _say(document: dict[str, Any]) -> None:
    print(MARK + json.dumps({"machine": inspect_machine().to_document(), **document}), flush=True)


def _start_ranks(count: int, seconds: float) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    counts = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    command = [sys.executable, "-m", "trainyard.parallel.probe", "--seconds", str(seconds)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **meeting, **counts, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    deadline = time.monotonic() + seconds
    try:
        for rank in ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _say({"error": f"{count} ranks on this machine did not finish within {seconds:.0f} s"})
        return InfrastructureError.exit_status
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = {rank.returncode for rank in ranks} - {0}
    known = (ConfigError.exit_status, InfrastructureError.exit_status)
    return next((code for code in known if code in codes), known[-1]) if codes else 0


def _meet(seconds: float) -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist

        from trainyard.parallel.config import ParallelConfig
        from trainyard.parallel.launcher import rank_of_environment
        from trainyard.parallel.rendezvous import join_ranks
    except ImportError as error:
        raise ConfigError(
            f"ranks need torch, which does not load here: {error}; run "
            "`pip install '.[pretrain]'` in the checkout"
        ) from error
    rank, world_size, local_rank, local_ranks = rank_of_environment()
    has_own = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if has_own else torch.device("cpu")
    if has_own:
        torch.cuda.set_device(device)
    join_ranks(ParallelConfig(), device, "probe", timedelta(seconds=seconds))
    backend = dist.get_backend()
    values = torch.full((ELEMENTS[backend],), float(rank + 1), device=device)
    try:
        dist.all_reduce(values)  # the first one connects
        expected = world_size * (world_size + 1) / 2
        if not bool((values == expected).all()):
            raise InfrastructureError(
                f"the sum of {world_size} ranks over {backend} is wrong: {values[0].item()} where "
                f"{expected} is right; a device or a link is broken; do not train here"
            )
        speed = _bytes_per_second(values, world_size, device.type == "cuda")
    except RuntimeError as error:
        raise CommunicationError(
            f"ranks met, but {backend} failed between them: {str(error).splitlines()[0]}; "
            "NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME and NCCL_IB_HCA are where to look"
        ) from error
    version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
    return {
        "backend": backend,
        "ranks": world_size,
        "hosts": _hosts(world_size),
        "bytes_per_second": speed,
        "nccl": version,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "devices": torch.cuda.device_count(),
    }


def _bytes_per_second(values: Any, world_size: int, is_cuda: bool) -> float:
    """Bus bandwidth of an all-reduce: bytes of a rank times 2 (n - 1) / n, per second."""
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(values)
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / REPEATS
    size: int = values.numel() * values.element_size()
    return 2 * (world_size - 1) / world_size * size / seconds


def _hosts(world_size: int) -> list[str]:
    import torch.distributed as dist

    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, socket.gethostname())
    return sorted(set(names))


if __name__ == "__main__":
    sys.exit(main())
