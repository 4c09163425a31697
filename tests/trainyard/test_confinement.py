"""A process that reads a foreign file can open none, and reach no network."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainyard.confinement import answer_of, environment, is_out_of_time

CONFINED = """
import os, signal, socket, sys
from trainyard.confinement import confine, leave_network
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR)
network = leave_network()
confine(2**30, 2)
"""
TRIES = """
tries = {
    "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "create": lambda: os.open(sys.argv[1] + "2", os.O_WRONLY | os.O_CREAT),
    "append": lambda: os.pwrite(file, b"x", 3),
    "overwrite": lambda: os.pwrite(file, b"x", 0),
    "copy": lambda: os.dup(0),
    "connect": lambda: socket.socket(),
    "pair": lambda: socket.socketpair(),
    "memory": lambda: bytearray(2**31),
}
for name, attempt in tries.items():
    try:
        attempt()
        print(name, "got through")
    except (OSError, MemoryError):
        pass
print("read", os.pread(file, 3, 0))
"""


def started(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)


def test_nothing_is_opened_written_or_reached_any_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    process = started(CONFINED + TRIES, str(file))
    assert answer_of(process, 30, 1000).decode().split("\n") == ["read b'old'", ""]
    assert process.returncode == 0
    assert file.read_text() == "old"
    assert not (tmp_path / "file2").exists()


def test_no_program_gets_more_rights_than_it_has() -> None:
    show = 'print(*[x for x in open("/proc/self/status") if "NoNewPrivs" in x])'
    process = started(CONFINED.replace("confine(2**30, 2)", show), __file__)
    assert answer_of(process, 30, 1000).split() == [b"NoNewPrivs:", b"1"]


@pytest.mark.slow
def test_its_time_is_bounded() -> None:
    process = started(f"{CONFINED}\nwhile True: pass", __file__)
    assert answer_of(process, 30, 1000) == b""
    assert is_out_of_time(process.returncode)
    began = time.monotonic()
    process = started("import time; time.sleep(60)")
    assert answer_of(process, 0.5, 1000) == b""
    assert is_out_of_time(process.returncode)
    assert time.monotonic() - began < 30


def test_what_it_prints_is_bounded() -> None:
    process = started("while True: print('x' * 1000)")
    assert len(answer_of(process, 30, 5000)) == 5001
    assert process.returncode != 0


def test_it_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    names = answer_of(started("import os; print(*os.environ)"), 30, 5000).decode().split()
    assert set(names) <= {"LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONPATH"}
