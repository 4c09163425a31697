"""The locks of the CUDA images, which no test builds, resolve on the package index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import lock as locking
from images import smoke

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

CUDA = [lock for lock in locking.locks() if lock.name.startswith("cuda/")]
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_28"
HASH = re.compile(r"sha256:[0-9a-f]{64}")


def run(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def uv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """uv in PATH, one of its own where there is none, and an index that answers."""
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("uv") is None:
            folder = tmp_path_factory.mktemp("uv")
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder))
            if (done := run(*pip, "uv")).returncode:
                pytest.skip(f"neither uv nor an index to have it from: {done.stderr.strip()}")
            patch.setenv("PATH", os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]))
        asked = run("uv", "pip", "compile", "--quiet", "--no-cache", "-", given="six\n")
        if asked.returncode:
            pytest.skip(f"no package index answers: {asked.stderr.strip()}")
        yield


def hashes(text: str) -> dict[str, set[str]]:
    """By package: those of its files."""
    entries = re.split(r"\n(?=[a-z0-9])", text)
    found = [(pin, entry) for entry in entries if (pin := smoke.PINNED.search(entry))]
    return {smoke.normal(pin[1]): set(HASH.findall(entry)) for pin, entry in found}


@pytest.mark.parametrize("lock", CUDA, ids=lambda lock: lock.name)
def test_index_resolves_the_same_versions_and_knows_every_hash(lock: locking.Lock) -> None:
    """It may know more of them: a file that came to a version later."""
    here = Path(locking.LOCKS, f"{lock.name}.txt").read_text()
    there = locking.written(lock)
    assert dict(smoke.PINNED.findall(there)) == dict(smoke.PINNED.findall(here))
    known = hashes(there)
    assert {
        name: own - known[name] for name, own in hashes(here).items() if own - known[name]
    } == {}


@pytest.mark.parametrize("lock", CUDA, ids=lambda lock: lock.name)
def test_every_package_has_a_wheel_for_the_image(lock: locking.Lock, tmp_path: Path) -> None:
    """The images have no compiler."""
    command = ["uv", "pip", "install", "--dry-run", "--no-build", "--no-deps", "--require-hashes"]
    command += [
        "--python-version",
        PYTHON,
        "--python-platform",
        PLATFORM,
        "--target",
        str(tmp_path),
    ]
    done = run(*command, "--requirement", str(Path(locking.LOCKS, f"{lock.name}.txt")))
    assert done.returncode == 0, done.stderr


def test_hash_of_no_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv takes hashes over from a lock that it is shown, without a look at the index."""
    (lock,) = [lock for lock in CUDA if lock.name == "cuda/sbom"]
    path = tmp_path / f"{lock.name}.txt"
    path.parent.mkdir()
    text = Path(locking.LOCKS, f"{lock.name}.txt").read_text()
    path.write_text(text.replace(HASH.findall(text)[0], "sha256:" + "0" * 64))
    monkeypatch.setattr(locking, "LOCKS", tmp_path)
    assert locking.written(lock) == text
