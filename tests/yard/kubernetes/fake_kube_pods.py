"""What a kubelet does, for the stand-in: pods as processes of this machine, in namespaces.

The pods of a job share a network of their own and a file of hosts with their names; each has a PID
and a UTS namespace, so that its first process is process 1, and what ends it ends all. Memory is
bounded by a cgroup. Images are not looked at: the command runs on this machine, as root."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.yard.kubernetes.fake_kube_store import Document, now

CGROUPS = Path("/sys/fs/cgroup/memory")
PROGRAMS = ("unshare", "nsenter", "ip", "mount")
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

HOLD = 'ip link set lo up && mount --bind "$1" /etc/hosts && echo ready && exec sleep 100000'
ENTER = 'hostname "$1"; cd "$2" && shift 2 && exec "$@"'
LIMIT = 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"'


def why_no_pods() -> str:
    """Why pods cannot run here; empty when they can."""
    if os.geteuid() != 0:
        return "pods of the stand-in need root, for their namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def expand(text: str, variables: dict[str, str]) -> str:
    """$(NAME) as a kubelet replaces it; $$ is $, wherever it stands."""

    def put(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, text)


@dataclass
class Network:
    """The network of a job's pods, and the names in it."""

    folder: Path
    holder: asyncio.subprocess.Process | None = None
    names: list[str] = field(default_factory=lambda: ["localhost"])
    making: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    async def enter(self, *names: str) -> list[str]:
        """Add names; the words before a command that is to run in it."""
        self.names += names
        self.hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in self.names))
        async with self.making:
            await self._hold()
        assert self.holder is not None
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount"]

    async def _hold(self) -> None:
        """The process whose namespaces these are."""
        if self.holder is None:
            command = ("unshare", "--net", "--mount", "sh", "-c", HOLD, "sh", str(self.hosts))
            self.holder = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self.holder.stdout is not None
            assert (await self.holder.stdout.readline()) == b"ready\n"

    def close(self) -> None:
        if self.holder is not None and self.holder.returncode is None:
            self.holder.kill()


@dataclass
class Container:
    """The one container of a pod, running or ended."""

    name: str
    process: asyncio.subprocess.Process
    network: list[str]
    variables: dict[str, str]
    cgroup: Path | None
    lifecycle: dict[str, Any]
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    """Nanoseconds since 1970, and a line of its log."""
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    is_read: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        """Until it has ended and its log is whole."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append((time.time_ns(), line.rstrip(b"\n")))
            async with self.news:
                self.news.notify_all()
        await self.process.wait()
        self.is_read = True
        async with self.news:
            self.news.notify_all()

    def first_process(self) -> int | None:
        """Its process 1, as this machine counts."""
        pid = self.process.pid
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return None

    def send(self, number: int) -> None:
        first = self.first_process()
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, number)

    async def stop(self, grace_seconds: float) -> None:
        """The hook, SIGTERM, and SIGKILL after the grace."""
        deadline = time.monotonic() + grace_seconds
        hook = self.lifecycle.get("preStop", {}).get("exec")
        first = self.first_process()
        if hook is not None and first is not None:
            enter = [*self.network, "nsenter", f"--target={first}", "--pid", "--mount"]
            run = await asyncio.create_subprocess_exec(
                *enter,
                *hook["command"],
                env=self.variables,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.wait(), grace_seconds)
        self.send(signal.SIGTERM)
        left = max(2.0, deadline - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), left)
        self.send(signal.SIGKILL)
        await self.process.wait()

    def status(self, image: str) -> Document:
        """The terminated state."""
        code = self.process.returncode or 0
        reason = "Completed" if code == 0 else "Error"
        if self.cgroup is not None and self._was_killed_for_memory():
            reason = "OOMKilled"
        ended = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": reason,
            "startedAt": now(),
            "finishedAt": now(),
        }
        return container_status(self.name, image, {"terminated": ended})

    def _was_killed_for_memory(self) -> bool:
        assert self.cgroup is not None
        counts = (self.cgroup / "memory.oom_control").read_text().split()
        return int(counts[counts.index("oom_kill") + 1]) > 0

    def clean(self) -> None:
        if self.cgroup is not None:
            with contextlib.suppress(OSError):
                self.cgroup.rmdir()


def container_status(name: str, image: str, state: Document) -> Document:
    status = {"name": name, "ready": "running" in state, "restartCount": 0, "state": state}
    return {**status, "image": image, "imageID": ""}


def environment(
    container: Document, index: str, secrets: dict[str, dict[str, str]]
) -> dict[str, str]:
    """The variables of a container, as a kubelet makes them."""
    variables = {"PATH": os.environ["PATH"]}
    for source in container.get("envFrom", ()):
        variables |= secrets[source["secretRef"]["name"]]
    for one in container.get("env", ()):
        given = index if "valueFrom" in one else one.get("value", "")
        variables[one["name"]] = expand(given, variables)
    return variables


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def _cgroup(name: str, container: Document) -> Path | None:
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    if limit is None or not (CGROUPS / "memory.limit_in_bytes").exists():
        return None
    folder = CGROUPS / f"trainyard-{name}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(_bytes(limit)))
    return folder


async def start(
    pod: Document, network: Network, index: str, secrets: dict[str, dict[str, str]]
) -> Container:
    """Run the container of a pod."""
    meta, spec = pod["metadata"], pod["spec"]
    container = spec["containers"][0]
    variables = environment(container, index, secrets)
    host = spec.get("hostname") or meta["generateName"].rstrip("-")
    domain = [f"{host}.{spec['subdomain']}"] if "subdomain" in spec else []
    inside = await network.enter(host, *domain)
    words = [*container.get("command", ()), *container.get("args", ())]
    own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    folder = container.get("workingDir") or os.getcwd()  # nsenter goes to the root
    command = [*inside, *own, "sh", "-c", ENTER, "sh", host, folder]
    command += [expand(word, variables) for word in words]
    cgroup = _cgroup(meta["name"], container)
    if cgroup is not None:
        command = ["sh", "-c", LIMIT, "sh", str(cgroup), *command]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=2**22,
    )
    lifecycle = container.get("lifecycle", {})
    return Container(container["name"], process, [], variables, cgroup, lifecycle)
