"""Containers that no flow came back for, swept from a real engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.spec import LaunchSpec
from flows.gc.containers import left_containers
from flows.gc.policy import STANDARD, Garbage, Policy
from tests.yard.container.containers import (
    containers,
    counting,
    docker,
    follow,
    job,
    steps_of,
    text_of,
    until,
)
from tests.yard.yard import Ended, Yard
from trainyard.errors import ClaimHeldError

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]

AT_ONCE = Policy(attempt_days=0)
PROFILE = 'block = "container"\nimage = "none:0"\n'


def state(key: str) -> str:
    return docker("inspect", "--format", "{{.State.Status}}", *containers(key))


def left(key: str, policy: Policy = AT_ONCE) -> list[Garbage]:
    """What a sweep would remove of this test alone: others use the engine too."""
    return [one for one in left_containers(os.environ["DOCKER_HOST"], policy) if key in one.url]


def gc(folder: Path, *arguments: str) -> Ended:
    """Sweep a yard of containers by the command, dry."""
    profile = folder / "site.toml"
    profile.write_text(PROFILE)
    (folder / "yard").mkdir(exist_ok=True)
    command = ("-m", "flows.gc", "--profile", str(profile), "--dry-run", *arguments)
    return Yard(folder).run(*command)


def forsaken(folder: Path, key: str, image: str, steps: int) -> LaunchSpec:
    """Start a container, and forget it at its first line: as after a kill nobody hears the rest."""
    block = job(folder, key, image, counting(steps))
    code = (
        "import asyncio, os, sys; from pathlib import Path;"
        "from tests.yard.container.containers import counting, job, text_of, until\n"
        "async def main():\n"
        "    block = job(Path(sys.argv[1]), *sys.argv[2:4], counting(int(sys.argv[4])))\n"
        "    await block.trigger()\n"
        "    await until(lambda: text_of(block))\n"
        "    os._exit(9)\n"
        "asyncio.run(main())\n"
    )
    yard = Yard(folder, {"PYTHONPATH": ".", "DOCKER_HOST": os.environ["DOCKER_HOST"]})
    ended = yard.run("-c", code, str(folder), key, image, str(steps))
    assert ended.status == 9, ended.err
    return block.spec


def test_unseen_end_is_recorded_before_removal(tmp_path: Path, key: str, image: str) -> None:
    forsaken(tmp_path, key, image, 40)
    block = job(tmp_path, key, image, counting(40))
    assert steps_of(block) != list(range(40))
    assert left(key) == []  # it runs
    asyncio.run(until(lambda: state(key) == "exited"))

    name = f"trainyard-job-{key}"
    result = gc(tmp_path, "--attempt-days", "0")
    assert result.status == 0, result.err
    assert f"container: {name}, " in result.out
    assert "no flow followed it" in result.out
    assert name not in gc(tmp_path).out  # not yet, by the standing policy
    assert left(key, STANDARD) == []
    assert state(key) == "exited"

    (one,) = left(key)
    one.remove()
    assert containers(key) == []
    assert steps_of(block) == list(range(40))
    assert follow(block)[1].kind is Kind.DONE
    assert text_of(block, "starts") == "start\n"
    one.remove()  # as a second sweep would that has looked before


def test_only_our_ended_containers_are_removed(tmp_path: Path, key: str, image: str) -> None:
    """One of another name that bears our label, and one that runs again when it is to go."""
    label = f"--label=trainyard.key={key}"
    docker("run", "--detach", label, "--name", f"theirs-{key}", image, "true")
    ours = ("--label=trainyard.job=job", "--name", f"trainyard-job-{key}")
    docker("run", "--detach", label, *ours, image, "sleep", "2")
    asyncio.run(until(lambda: state(key).split() == ["exited"] * 2))
    (one,) = left(key)
    docker("start", f"trainyard-job-{key}")
    with pytest.raises(ClaimHeldError, match="a flow follows it again"):
        one.remove()
    assert len(containers(key)) == 2


def test_absent_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    ended = gc(tmp_path)
    assert ended.status == 3
    assert "not checked: the Docker engine at" in ended.out
    assert ended.out.rstrip().endswith("nothing to remove")
