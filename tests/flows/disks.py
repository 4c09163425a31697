"""Small disks, to be filled."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SMALL_BYTES = 16 << 20


@contextmanager
def small_disk(folder: Path, size: str = "64k", num_files: int = 1000) -> Iterator[Path]:
    """A disk on this folder, of so many bytes and files (its root counts as one)."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    folder.mkdir()
    bounds = f"size={size},nr_inodes={num_files}"  # without a size it takes half of the memory
    small = ["mount", "-t", "tmpfs", "-o", bounds, "tmpfs", str(folder)]
    if subprocess.run(small, check=False, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("this machine lets nobody mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def give_room(folder: Path) -> None:
    """Enlarge a disk and keep its files."""
    larger = ["mount", "-o", "remount,size=64m,nr_inodes=50000", str(folder)]
    subprocess.run(larger, check=True)


def fill(folder: Path) -> Path:
    """Until no byte more goes onto a small disk; the file that takes the room."""
    disk = os.statvfs(folder)
    assert disk.f_blocks * disk.f_frsize <= SMALL_BYTES, f"{folder} is on no small disk"
    filling = folder / "filling"
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filling


def fill_with_files(folder: Path) -> None:
    """Until neither a byte nor a file goes onto a small disk."""
    fill(folder)
    with contextlib.suppress(OSError):
        for number in range(10**6):
            (folder / f"filling-{number}").touch()


@contextmanager
def nothing_written() -> Iterator[None]:
    """No file takes a byte of this process, as on a disk that is full; for moments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # Python has SIGXFSZ ignored
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
