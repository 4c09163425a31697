"""Dockerfiles, where they can be read but not all of them built."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("images", "deploy")
    for path in (ROOT / folder).rglob("*Dockerfile")
)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_warns_of_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_dockerfiles() -> None:
    assert {"images/cpu.Dockerfile", "images/cuda.Dockerfile"} < set(DOCKERFILES)


# --- torch's wheel, by its hash -----------------------------------------------------------------


def torch_layer(folder: Path) -> str:
    """The shell of the layer that installs torch, with its folders below `folder`."""
    text = (ROOT / "images/cpu.Dockerfile").read_text()
    layer = text[text.index("FROM base AS torch\n") :]
    run = layer[layer.index('    torch="$') : layer.index("\n\n# ---")]
    return (
        run.replace("\\\n", "")
        .replace("/wheels", str(folder))
        .replace("/torch.txt", f"{folder}/torch.txt")
    )


def write_wheel(folder: Path) -> str:
    """A wheel named as that of torch; returns its hash."""
    info = "torch-1.0.dist-info"
    wheel = folder / "torch-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["none", "right", "wrong"])
def test_a_wheel_of_torch_is_that_of_the_hash_if_one_is_named(given: str, tmp_path: Path) -> None:
    right = write_wheel(tmp_path)
    (tmp_path / "torch.txt").write_text("torch==1.0\n")
    pip = tmp_path / "pip"
    pip.write_text(
        f'#!/bin/sh\nshift 3\nexec {sys.executable} -m pip install -t {tmp_path}/t "$@"\n'
    )
    pip.chmod(0o755)
    sha256 = {"none": "", "right": right, "wrong": "0" * 64}[given]
    done = subprocess.run(
        ["sh", "-c", torch_layer(tmp_path)],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "TORCH_SHA256": sha256,
            "PIP_CONFIG_FILE": "/dev/null",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (given != "wrong"), done.stderr
    assert (tmp_path / "t/torch.py").exists() == (given != "wrong")
    assert given != "wrong" or "DO NOT MATCH THE HASHES" in done.stderr
