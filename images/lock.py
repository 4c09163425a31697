"""Write the locks of the images and of `make install`: every package, pinned, with the hashes of
its files.

    python images/lock.py              after a change of pyproject.toml or constraints.txt; needs uv
    python images/lock.py --check      exit 1 when a lock is not what this would write

Versions are those of constraints.txt, so an image has what the tests had. torch has locks of its
own, as every index has other builds of it, and a CUDA image brings its own. What torch needs is in
images/uv.toml, for a CPU build: the metadata on the usual index are those of CUDA. The libraries
that a CUDA build needs are in cuda/install. The locks of `make install` hold for every machine and
Python, with markers; the others for that of their image."""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "images" / "locks"
CONSTRAINTS = ROOT / "constraints.txt"

PLAIN = (
    *("blame", "certify", "clean", "collect", "datasheet", "decontaminate", "dedup"),
    *("faiss-add", "faiss-query", "faiss-train", "index", "merge", "mix", "plan", "report"),
    *("retro-db", "retro-explore", "retro-export", "retro-import"),
    *("score", "tokenize", "train-tokenizer", "verify"),
)
"""Stages without torch."""
TRAINING = (
    *("benchmark", "evaluate", "generate", "parity", "pretrain", "quantize", "reshard"),
    *("retro-embed", "serve"),
)
"""Stages that have a CUDA image too."""
TORCH = ("inspect", "retro-preprocess", *TRAINING)
FAISS_GPU = {"faiss-query": ("datasets",), "faiss-train": ()}
"""Stages that have an image with faiss for GPUs, which stands on none of NVIDIA's, and their extras
besides faiss."""
MORE = {"pretrain": ("logging",), "flow": ("flows",)}
"""Extras of an image besides those of its stage."""
TOOLS = {"build": ("setuptools",), "pip": ("pip",), "sbom": ("cyclonedx-bom",)}
"""Packages of a build step or of `make install`, which are in no image."""
TORCH_INDEXES = {
    "usual": "",
    "cpu": "https://download.pytorch.org/whl/cpu",
    "cu130": "https://download.pytorch.org/whl/cu130",
}
"""Where torch comes from, by the lock in images/locks/torch that has the hashes of its files."""
NO_ANSWER = 2
"""uv's exit status if it cannot ask an index."""
NGC = ("torch", "numpy", "mpmath", "networkx", "setuptools", "sympy")
"""Packages that NVIDIA's image has in matching builds."""
BESIDE_TORCH = (
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy"),
    "typing-extensions",
)
"""What every build of torch needs, which the lock of `make install` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock and the arguments that make it."""

    name: str
    """Path of the lock under images/locks/, without the suffix."""
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """Instead of extras: packages by name."""
    python: str = "3.11.9"
    without: tuple[str, ...] = ("torch",)
    is_universal: bool = False
    """For every system, and every Python from that version on."""
    index: str = ""
    """Where the packages come from, if not from the usual index."""
    options: tuple[str, ...] = ("--config-file", str(ROOT / "images" / "uv.toml"))
    """More options of uv."""

    @property
    def head(self) -> str:
        """The first line; images/smoke.py reads the extras in it."""
        wanted = "a tool of the build"
        if self.extras:
            wanted = f"extras: {' '.join(self.extras)}"
        elif "torch" in self.packages:
            wanted = f"files of {self.index or 'the usual index'}"
        return f"# {self.name}: {wanted}; made by images/lock.py\n"


def locks() -> Iterator[Lock]:
    """All locks, in order."""
    for name in [*PLAIN, *TORCH, "flow"]:
        own = () if name == "flow" else (name,)
        yield Lock(name=name, extras=(*own, "s3", *MORE.get(name, ())))
    for name, more in FAISS_GPU.items():
        yield Lock(name=f"cuda/{name}", extras=("faiss-gpu", "s3", *more))
    for name in TRAINING:
        extras = (name, "s3", *MORE.get(name, ()))
        yield Lock(name=f"cuda/{name}", extras=extras, python="3.12.3", without=NGC)
    yield Lock(name="install", extras=("all", "dev"), python="3.11", is_universal=True)
    for name, index in TORCH_INDEXES.items():
        options = ("--no-deps", "--no-config")
        yield Lock(
            name=f"torch/{name}", packages=("torch",), without=(), index=index, options=options
        )
    yield Lock(
        name="cuda/install",
        packages=("torch",),
        without=("torch", *BESIDE_TORCH),
        python="3.11",
        is_universal=True,
        options=("--no-config",),
    )
    for name, packages in TOOLS.items():
        yield Lock(name=name, packages=packages, without=())
    yield Lock(name="cuda/sbom", packages=TOOLS["sbom"], python="3.12.3", without=())


def is_current(path: Path) -> bool:
    """Whether a lock of torch is there and has the version of constraints.txt."""
    pin = next(x for x in CONSTRAINTS.read_text().splitlines() if x.startswith("torch=="))
    return path.exists() and re.search(rf"^{re.escape(pin)}\b", path.read_text(), re.M) is not None


def written(lock: Lock) -> str:
    """The text of a lock; asks the package index."""
    with tempfile.TemporaryDirectory() as scratch:
        # Versions of a lock stay unless something else pins them. uv does not get the hashes: it
        # would copy them unchecked.
        output = Path(scratch, "lock.txt")
        before = LOCKS / f"{lock.name}.txt"
        if before.exists():
            pins = [line.partition(" ")[0] for line in before.read_text().splitlines()]
            output.write_text("\n".join(pin for pin in pins if "==" in pin) + "\n")
        wanted = ROOT / "pyproject.toml"
        if lock.packages:
            wanted = Path(scratch, "wanted.in")
            wanted.write_text("\n".join(lock.packages) + "\n")
        command = ["uv", "pip", "compile", str(wanted), "--quiet", "--no-header", "--no-annotate"]
        command += [*lock.options, *(["--default-index", lock.index] if lock.index else [])]
        command += ["--output-file", str(output), "--generate-hashes"]
        command += ["--python-version", lock.python, "--constraint", str(CONSTRAINTS)]
        command += (
            ["--universal"] if lock.is_universal else ["--python-platform", "x86_64-manylinux_2_28"]
        )
        command += [part for extra in lock.extras for part in ("--extra", extra)]
        command += [part for package in lock.without for part in ("--no-emit-package", package)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == NO_ANSWER and lock.index and is_current(before):
            print(f"{before.relative_to(ROOT)}: left as it is, {lock.index} does not answer")
            return before.read_text()
        if found.returncode:
            raise SystemExit(f"{lock.name}: {' '.join(command)}\n{found.stderr}")
        lines = [line for line in output.read_text().splitlines() if not line.startswith("#")]
    return lock.head + "\n".join(lines) + "\n"


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write the locks of the images.")
    parser.add_argument("--check", action="store_true", help="only report what is not up to date")
    given = parser.parse_args()
    texts = {lock.name: written(lock) for lock in locks()}
    stale = 0
    for name, text in texts.items():
        path = LOCKS / f"{name}.txt"
        before = path.read_text() if path.exists() else ""
        if before == text:
            continue
        stale += 1
        print(f"{path.relative_to(ROOT)}: {'not up to date' if given.check else 'written'}")
        if given.check:
            difference = difflib.unified_diff(before.splitlines(), text.splitlines(), n=0)
            print("\n".join(list(difference)[:20]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
