"""A stage of several ranks, without torch: each leaves a file, rank 0 joins them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.runtime.cli import stage_main
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import InfrastructureError

MORE_BYTES = 400 << 20
"""Of memory, than the rank may have that takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """Every rank says its number."""

    output_dir: str = location()
    """Where to."""
    nproc_per_node: int = execution(1)
    """Ranks."""
    fail_rank: int = execution(-1)
    """The rank that fails."""
    how: str = execution("")
    """How it fails: infrastructure, kill, memory."""
    seconds: float = execution(0.0)
    """How long the other ranks work."""
    saving_seconds: float = execution(0.0)
    """How long a rank saves after a request to stop."""

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None."""
        return {}

    def output(self) -> Output:
        """A folder."""
        return Output.directory(self.output_dir)


def run(config: RanksConfig, stage: StageRun) -> dict[str, Any]:
    """Rank r writes r.txt into the work folder; rank 0 waits for all of them."""
    stage.defer_signals()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == config.fail_rank:
        if config.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.how == "memory":
            Path("/proc/self/oom_score_adj").write_text("1000")  # this process alone
            bytearray(b"x" * MORE_BYTES)
        raise InfrastructureError("the network is gone")
    store.write_bytes(stage.work.url(f"{rank}.txt"), str(rank).encode())
    deadline = time.monotonic() + config.seconds
    while time.monotonic() < deadline:
        if stage.stop_requested:
            _save(config, stage, rank)
            stage.stop()
        time.sleep(0.02)
    if stage.is_main:
        for other in range(world):
            while not store.exists(stage.work.url(f"{other}.txt")):
                time.sleep(0.02)
        stage.write_bytes("ranks.txt", " ".join(map(str, range(world))).encode())
    return {"world": world}


def _save(config: RanksConfig, stage: StageRun, rank: int) -> None:
    """Takes its time, and leaves what tells that it was whole."""
    print(f"rank {rank} saves", flush=True)
    time.sleep(config.saving_seconds)
    print(f"rank {rank} has saved", flush=True)
    store.write_bytes(stage.work.url(f"{rank}.saved.txt"), b"whole")


if __name__ == "__main__":
    raise SystemExit(stage_main("toy_ranks", RanksConfig, "tests.stages.toy_ranks"))
