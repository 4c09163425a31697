"""Runs a stage on several ranks: its own child processes, or the ranks of a launcher.

A stage whose configuration has `nproc_per_node` > 1 starts its own command once for each rank. The
parent (no torch) decides, claims, supervises and publishes; rank 0 returns its records and metrics
in a file. Under torchrun, or a job block, each process is a rank already: rank 0 decides and
announces the decision to the others."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.runtime import parent_watch
from stages.runtime.context import STOPPING, StageRun
from stages.runtime.failure import add_step, read_step
from stages.runtime.libraries import loaded_libraries
from stages.runtime.parent_watch import LIFELINE
from trainyard.artifacts.inputs import Input
from trainyard.artifacts.manifest import ManifestSlot, PartRecord
from trainyard.artifacts.store import FileRecord
from trainyard.errors import (
    CommunicationError,
    ConfigError,
    DataError,
    InfrastructureError,
    RerunElsewhere,
    Stopped,
    TrainyardError,
    ValidationFailed,
)
from trainyard.machine import death_by_signal, memory_kills
from trainyard.parallel.launcher import address_of_environment, rank_of_environment

log = logging.getLogger(__name__)

HANDOVER = "TRAINYARD_RANKS"
"""Environment variable of the ranks: the folder in which they and the parent exchange files."""

STEP_FILE = "step"
"""File in that folder: the last step that rank 0 finished, of a stage that has steps."""

BY_STATUS: dict[int, type[TrainyardError]] = {
    kind.exit_status: kind
    for kind in (DataError, ConfigError, InfrastructureError, RerunElsewhere, ValidationFailed)
}
DECISION_SECONDS = 1800
CAUSE_SECONDS = 2.0
LESS_MEMORY = "lower --micro-batch-size or --nproc-per-node, or request more memory"
JOIN_MINUTES = 10.0
"""How long ranks wait for each other if the configuration has no timeout."""


def run_here_or_spawn(
    config: Any, run: StageRun, run_module: str, arguments: list[str]
) -> dict[str, Any]:
    """Run the stage's own module, in this process or in new ranks; returns its metrics."""
    count = num_ranks(config)
    if count > 1 and "RANK" not in os.environ:
        return _spawn(run, arguments, count)
    with _cause_first(count):
        metrics: dict[str, Any] = importlib.import_module(run_module).run(config, run)
    run.libraries = loaded_libraries()
    return metrics


@contextmanager
def _cause_first(count: int) -> Iterator[None]:
    """Delay the error of a lost connection, so that its cause is reported first.

    When a rank fails, the others lose their connection to it, often before it has reported its own
    error and before the supervisor of the ranks has seen it fail."""
    try:
        yield
    except CommunicationError:
        if count > 1:
            time.sleep(CAUSE_SECONDS)
        raise


def num_ranks(config: Any) -> int:
    """Number of ranks of the launcher, or else to start here."""
    if "RANK" in os.environ and _has_ranks(config):
        return rank_of_environment()[1]
    return int(getattr(config, "nproc_per_node", 1))


# --- the parent -------------------------------------------------------------------------------


def _spawn(run: StageRun, arguments: list[str], count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trainyard-ranks-") as folder:
        Path(folder, "run.json").write_text(json.dumps(_encode(run)))
        port = _free_port()
        read_end, write_end = os.pipe()
        run.defer_signals()
        kills = memory_kills()
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                ranks.append(_start(arguments, folder, rank, count, port, read_end))
            os.close(read_end)
            _supervise(run, ranks, kills)
        except BaseException as error:
            add_step(error, read_step(Path(folder, STEP_FILE)))
            raise
        finally:
            _end(ranks)
            os.close(write_end)
        return _read_result(run, Path(folder, "result.json"))


def _start(
    arguments: list[str], folder: str, rank: int, count: int, port: int, read_end: int
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        HANDOVER: folder,
        LIFELINE: str(read_end),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", _program(), *arguments]
    return subprocess.Popen(command, env=environment, pass_fds=(read_end,), start_new_session=True)


def _program() -> str:
    """The module that this process was started as."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "several ranks need a program started with python -m"
    return spec.name.removesuffix(".__main__")


def _supervise(run: StageRun, ranks: list[subprocess.Popen[bytes]], kills: int) -> None:
    """Wait for every rank. Raise the error of a rank that fails; forward a signal to all ranks.
    kills: `memory_kills` before they were started."""
    passed_on = False
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
        if run.stop_requested and not passed_on:
            passed_on = True
            _signal(ranks, signal.SIGTERM)
        elif failed and not run.stop_requested:
            _raise_for(*min(failed, key=lambda found: _likely_cause(found[1])), kills)
        if all(code is not None for code in codes):
            _raise_if_stopped(run, [code for code in codes if code is not None], kills)
            return
        time.sleep(0.05)


def _raise_if_stopped(run: StageRun, codes: list[int], kills: int) -> None:
    """Raise the error of a failed rank; otherwise Stopped, if a signal stopped any rank, maybe
    before the rank had a handler."""
    stopped = [code for number in STOPPING for code in (128 + number, -number)]
    for rank, code in enumerate(codes):
        if code not in (0, *stopped):
            _raise_for(rank, code, kills)
    if any(codes):
        run.stop()


def _likely_cause(code: int) -> int:
    """Sort key of failures seen at once, the likely cause first: a rank that fails makes the others
    lose their connection to it."""
    if code < 0 and code != -signal.SIGABRT:  # NCCL's watchdog aborts ranks that lost another
        return -1
    causes = [status for status in BY_STATUS if status != InfrastructureError.exit_status]
    if code in causes:
        return causes.index(code)
    # A lost connection is what others see of any failure, a defect included.
    return len(causes) + (code in (InfrastructureError.exit_status, -signal.SIGABRT))


def _raise_for(rank: int, code: int, kills: int) -> None:
    if code == -signal.SIGABRT:
        raise CommunicationError(
            f"rank {rank} aborted; if NCCL's watchdog did it, the rank waited longer than "
            "--distributed-timeout-minutes for ranks that were gone or hung; see the lines above"
        )
    if code < 0:
        raise death_by_signal(f"rank {rank}", -code, kills, LESS_MEMORY)
    if code in BY_STATUS:
        raise BY_STATUS[code](f"rank {rank} ended with exit status {code}; its message is above")
    if code > 128:
        raise Stopped(code - 128)
    raise RuntimeError(f"rank {rank} ended with exit status {code}; its message is above")


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kill the remaining ranks of a failed run, which have nothing left to save."""
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _signal(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _encode(run: StageRun) -> dict[str, Any]:
    inputs = {name: asdict(found) for name, found in run.inputs.items()}
    names = {"lineage": run.lineage, "code": run.code, "reason": run.reason}
    return {"inputs": inputs, **names, "slot": _slot(run), "is_forced": run.is_forced}


def _decode(name: str, config: Any, document: dict[str, Any], is_main: bool) -> StageRun:
    inputs = {
        key: Input(key, tuple(found["urls"]), tuple(found["files"]), found["digest"])
        for key, found in document["inputs"].items()
    }
    run = StageRun(name, inputs, config.output(), document["lineage"], document["code"])
    run.reason, run.is_forced = document["reason"], document["is_forced"]
    run.slot = ManifestSlot(**document["slot"]) if document["slot"] else None
    run.is_main = is_main
    return run


def _slot(run: StageRun) -> dict[str, Any] | None:
    return asdict(run.slot) if run.slot else None


def _read_result(run: StageRun, result: Path) -> dict[str, Any]:
    document = json.loads(result.read_text())
    run.slot = ManifestSlot(**document["slot"]) if document["slot"] else None
    run.libraries, run.facts = document["libraries"], document["facts"]
    for record in document["records"]:
        run.record(FileRecord(**record))
    for part in document["parts"]:
        run.record_part(PartRecord(**part))
    metrics: dict[str, Any] = document["metrics"]
    return metrics


# --- a rank that the parent started -----------------------------------------------------------


def is_delegated() -> bool:
    """True in a rank that a parent of the same command started."""
    return HANDOVER in os.environ


def run_delegated(name: str, config: Any, run_module: str) -> int:
    """Do the work of one rank; rank 0 writes its records and metrics for the parent."""
    parent_watch.die_with_parent()
    folder = Path(os.environ[HANDOVER])
    is_main = os.environ["RANK"] == "0"
    run = _decode(name, config, json.loads((folder / "run.json").read_text()), is_main)
    run.step_file = folder / STEP_FILE if is_main else None
    _work(config, run, run_module, folder / "result.json" if is_main else None)
    return 0


def _work(config: Any, run: StageRun, run_module: str, result: Path | None) -> None:
    for number in STOPPING:
        signal.signal(number, run.on_signal)
    try:
        with _cause_first(num_ranks(config)):
            metrics = importlib.import_module(run_module).run(config, run)
    finally:
        run.close()
    if result is not None:
        records = [asdict(record) for record in run.records.values()]
        document = {"metrics": metrics, "records": records, "slot": _slot(run), "facts": run.facts}
        document["parts"] = [asdict(part) for part in run.parts.values()]
        document["libraries"] = loaded_libraries()
        result.write_text(json.dumps(document))


# --- torchrun and job blocks ------------------------------------------------------------------


def is_follower(config: Any) -> bool:
    """True in every rank but the first, when a launcher started the ranks."""
    return _has_ranks(config) and os.environ.get("RANK", "0") != "0"


def _has_ranks(config: Any) -> bool:
    """Whether the stage can run on several ranks; other stages ignore a launcher's RANK."""
    return hasattr(config, "nproc_per_node")


class Leader:
    """Announces the decision of rank 0 to the other ranks of a launcher, if there are any."""

    def __init__(self, config: Any) -> None:
        several = _has_ranks(config) and rank_of_environment()[1] > 1
        self._store = _decision_store(config) if several else None

    def announce(self, run: StageRun | None) -> None:
        """Announce the run to the followers; None: there is no work."""
        self.send({"run": None if run is None else _encode(run)})

    def send(self, decision: dict[str, Any]) -> None:
        """Send the decision to the followers; only the first one is sent."""
        if self._store is not None:
            self._store.set("decision", json.dumps(decision))
            self._store = None


@contextmanager
def leading(config: Any) -> Iterator[Leader]:
    """The leader of the ranks. An error before its announcement makes the followers fail too."""
    leader = Leader(config)
    try:
        yield leader
    except BaseException:
        leader.send({"failed": True})
        raise


def follow(name: str, config: Any, run_module: str) -> int:
    """Wait for rank 0's decision and do this rank's share of it."""
    with _cause_first(num_ranks(config)):
        decision = json.loads(_received(_decision_store(config)))
    if decision.get("failed"):
        time.sleep(CAUSE_SECONDS)  # meanwhile rank 0 reports the cause
        raise InfrastructureError("rank 0 failed before any work began; its message has the cause")
    if decision["run"] is None:
        return 0
    _work(config, _decode(name, config, decision["run"], is_main=False), run_module, None)
    return 0


def _received(store: Any) -> bytes:
    try:
        decision: bytes = store.get("decision")
    except RuntimeError as error:  # such as torch's DistNetworkError and DistStoreError
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        raise CommunicationError(
            f"rank {os.environ['RANK']} lost its connection to rank 0 at {address}:{port}: rank 0 "
            "ended, and its own message has the cause, or another program listens on that port "
            f"({str(error).splitlines()[0]})"
        ) from error
    return decision


def _decision_store(config: Any) -> Any:
    """The store for rank 0's decision. On rank 0, returns once all ranks have connected.

    Raises CommunicationError if the ranks do not find each other."""
    from datetime import timedelta

    rank, world_size, _, _ = rank_of_environment()
    address_of_environment()  # before torch is imported
    from trainyard.parallel.rendezvous import join_failure, open_store

    minutes = float(getattr(config, "distributed_timeout_minutes", JOIN_MINUTES))
    try:
        store = open_store(rank, world_size, timedelta(minutes=minutes))
    except (RuntimeError, ValueError) as error:
        raise join_failure(error, rank, world_size) from error
    store.set_timeout(timedelta(seconds=DECISION_SECONDS))
    return store
