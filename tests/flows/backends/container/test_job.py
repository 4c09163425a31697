"""What the end of a container means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.backends.container.client import ContainerState
from flows.backends.container.job import classify_container
from flows.backends.outcome import Kind
from flows.backends.spec import LaunchSpec, Resources


def report(name: str, status: int) -> dict[str, object]:
    """The failure.json of a stage."""
    return {"class": name, "exit_status": status, "message": "m", "step": 7}


NCCL = "torch.distributed.DistBackendError: NCCL error\n"
RANKS = Resources(processes_per_node=2)
STOPPED = report("Stopped", 143)


@pytest.mark.parametrize(
    ("found", "code", "oom", "by_us", "kind"),
    [
        ({}, 255, False, None, Kind.NODE_FAILURE),
        ({"failure.json": report("ConfigError", 2)}, 137, True, None, Kind.CONFIG),
        # a child that was killed for its memory is why its parent failed
        ({"failure.json": report("RuntimeError", 70)}, 70, True, None, Kind.OUT_OF_MEMORY),
        ({"failure.json": report("RuntimeError", 70)}, 0, True, None, Kind.DONE),
        # a container that a person removed may have succeeded
        ({}, None, False, None, Kind.UNKNOWN),
        ({"outcome.json": {"outcome": "ran"}}, None, False, None, Kind.DONE),
        ({"failure.json": STOPPED}, 143, False, Kind.STOPPED, Kind.STOPPED),
        ({"failure.json": STOPPED}, 143, False, Kind.TIME_LIMIT, Kind.TIME_LIMIT),
        ({"failure.json": STOPPED}, 143, False, Kind.HANG, Kind.HANG),
        # ranks that failed without a report
        ({"ranks": 2}, 1, False, None, Kind.UNKNOWN),
        ({"ranks": 2, "log.txt": NCCL}, 1, False, None, Kind.COMMUNICATION),
    ],
)
def test_end_of_a_container(
    tmp_path: Path,
    found: dict[str, object],
    code: int | None,
    oom: bool,
    by_us: Kind | None,
    kind: Kind,
) -> None:
    for name in found.keys() - {"ranks"}:
        text = found[name]
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    resources = RANKS if "ranks" in found else Resources()
    spec = LaunchSpec(
        name="pretrain", command=("python",), run_directory=str(tmp_path), resources=resources
    )
    state = None
    if code is not None:
        state = ContainerState("id", "key", "exited", code, oom, "", 0.0, 1.0)
    outcome = classify_container(spec, "yard-1", state, by_us)
    assert outcome.kind is kind
    assert ("restarted" in outcome.message) == (code == 255)
    if by_us is not None:
        assert outcome.step == 7
