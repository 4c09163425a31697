"""The script that applies our patches to packages of others, in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "images" / "apply-patches"
PATCHES = SCRIPT.parent / "patches"

pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program patch")

GOOD = """\
What is wrong, where it was reported, when this can go.
--- a/toy/answer.py
+++ b/toy/answer.py
@@ -1,3 +1,3 @@
 def answer():
-    return 41
+    return 42

"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment that has a package, `toy-package`, and nothing else."""
    found = tmp_path / "site"
    package, metadata = found / "toy", found / "toy_package-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "answer.py").write_text("def answer():\n    return 41\n\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    return found


def apply(site: Path, patches: Path) -> subprocess.CompletedProcess[str]:
    """The script, with a Python that sees that environment."""
    python = site.parent / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return subprocess.run([SCRIPT, patches, python], text=True, capture_output=True, timeout=30)


def write(patches: Path, package: str, text: str) -> Path:
    folder = patches / package
    folder.mkdir(parents=True)
    (folder / "answer.patch").write_text(text)
    return patches


@pytest.mark.slow
def test_a_patch_is_applied_where_its_package_lies(site: Path, tmp_path: Path) -> None:
    done = apply(site, write(tmp_path / "patches", "toy-package", GOOD))
    assert done.returncode == 0, done.stderr
    assert (site / "toy" / "answer.py").read_text() == "def answer():\n    return 42\n\n"
    assert "toy-package: answer.patch" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["of other lines", "twice"])
def test_one_that_does_not_apply_ends_the_build(site: Path, tmp_path: Path, again: bool) -> None:
    text = GOOD if again else GOOD.replace("return 41", "return 40")
    patches = write(tmp_path / "patches", "toy-package", text)
    if again:
        assert apply(site, patches).returncode == 0
    before = (site / "toy" / "answer.py").read_text()
    assert apply(site, patches).returncode != 0
    assert (site / "toy" / "answer.py").read_text() == before


@pytest.mark.slow
def test_an_image_without_the_package_stays_as_it_is(site: Path, tmp_path: Path) -> None:
    done = apply(site, write(tmp_path / "patches", "another", GOOD))
    assert done.returncode == 0, done.stderr
    assert (site / "toy" / "answer.py").read_text().endswith("41\n\n")


def test_no_patches_are_accepted(site: Path) -> None:
    """As it is today."""
    assert apply(site, PATCHES).returncode == 0


def test_every_patch_is_for_a_package_of_some_image_and_says_why() -> None:
    locks = "\n".join(path.read_text() for path in (SCRIPT.parent / "locks").rglob("*.txt"))
    for patch in PATCHES.glob("*/*.patch"):
        assert f"\n{patch.parent.name}==" in f"\n{locks}", patch
        assert not patch.read_text().startswith(("---", "diff ")), f"{patch}: say what is wrong"
