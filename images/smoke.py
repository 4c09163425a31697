"""Prove that an image has what its stage needs and nothing else; the build runs it.

    python images/smoke.py STAGE --device cpu|cuda --version VERSION [--locks FOLDER]

On a CPU image the installed packages are exactly those of the lock, trainyard and, for a stage
with torch, torch. So they are on one with faiss for GPUs. Any other CUDA image stands on NVIDIA's:
what its lock names is there in that version, torch, Transformer Engine, flash-attn and apex too.
Standard library only, but for what is tried."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

LOCKS = Path(__file__).resolve().parent / "locks"
TORCH_STAGES = [
    "benchmark",
    "evaluate",
    "generate",
    "inspect",
    "parity",
    "pretrain",
    "quantize",
    "reshard",
    "retro-embed",
    "retro-preprocess",
    "serve",
]
ACCELERATED = ("transformer_engine", "flash_attn", "apex")
FAISS = {"cpu": "faiss-cpu", "cuda": "faiss-gpu"}
"""Packages of the module `faiss`, by device; the lock says which images have them."""
NEVER = ("pytest", "hypothesis", "moto", "mypy", "pip")
"""In no image that we build without NVIDIA's."""
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
EXTRAS = re.compile(r"^# .*extras: ([a-z0-9 -]+);")
FLOOR = re.compile(r"^([A-Za-z0-9._-]+)>=([0-9.]+)")
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*extra == [\"']([a-z0-9-]+)[\"']")


class Smoke(SystemExit):
    """A fault of the image."""


def normal(name: str) -> str:
    """The normalized spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Version of every package, by name: the first on the path, which is the one imported."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        found.setdefault(normal(one.name), one.version)
    return found


def check_versions(lock: dict[str, str], extra: set[str], exact: bool) -> None:
    """Every package of the lock in its version and, where `exact`, no other but `extra`."""
    found = installed()
    wrong = {name: found.get(name) for name, version in lock.items() if found.get(name) != version}
    if wrong:
        raise Smoke(f"not as the lock has them: {wrong}")
    missing = extra - found.keys()
    if missing:
        raise Smoke(f"not installed: {sorted(missing)}")
    strangers = found.keys() - lock.keys() - extra
    if exact and strangers:
        raise Smoke(f"in the image and not in the lock: {sorted(strangers)}")


def wanted_packages(extras: list[str]) -> set[str]:
    """Packages of trainyard's extras, also through extras that they name."""
    pairs = [
        m.groups()
        for text in metadata.requires("trainyard") or []
        if (m := REQUIREMENT.match(text))
    ]
    inner = {
        (extra, other)
        for text in metadata.requires("trainyard") or []
        if (m := re.match(r"^trainyard\[([a-z0-9,-]+)\].*extra == [\"']([a-z0-9-]+)", text))
        for other in m[1].split(",")
        for extra in [m[2]]
    }
    reached, before = set(extras), set[str]()
    while reached != before:
        before = set(reached)
        reached |= {other for extra, other in inner if extra in reached}
    return {normal(name) for name, extra in pairs if extra in reached} - {"trainyard"}


def import_all(packages: set[str]) -> int:
    """Import the modules of some packages; returns their number."""
    modules = {
        module
        for module, names in metadata.packages_distributions().items()
        if any(normal(name) in packages for name in names)
        and module.isidentifier()
        and not module.startswith("_")
    }
    for module in sorted(modules):
        importlib.import_module(module)
    return len(modules)


def check_floors(wanted: set[str], lock: dict[str, str]) -> None:
    """Packages of NVIDIA's image are as new as trainyard requires."""
    for text in metadata.requires("trainyard") or []:
        found = FLOOR.match(text)
        if found is None or normal(found[1]) not in wanted - lock.keys():
            continue
        here = metadata.version(found[1])
        if release(here) < release(found[2]):
            raise Smoke(f"{found[1]} is {here}, and trainyard wants {found[2]} or newer")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of 2.13.0a0+nv."""
    head = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in head[0].split(".")) if head else ()


def check_absent(modules: tuple[str, ...]) -> None:
    """Check that none of these modules can be imported."""
    here = [name for name in modules if importlib.util.find_spec(name) is not None]
    if here:
        raise Smoke(f"must not be in this image: {here}")


def import_flows() -> int:
    """Import every module of the flows; returns their number."""
    flows = importlib.import_module("flows")
    names = [one.name for one in pkgutil.walk_packages(flows.__path__, "flows.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return len(names)


def check_stage(stage: str) -> None:
    """Check that the stage can be imported and prints its options."""
    module = f"stages.{stage.replace('-', '_')}"
    importlib.import_module(f"{module}.run")
    completed = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False
    )
    if completed.returncode or "--config" not in completed.stdout:
        raise Smoke(
            f"python -m {module} --help ended with {completed.returncode}: {completed.stderr}"
        )


def check_torch(device: str) -> None:
    """Check that torch computes, and has CUDA only in a CUDA build, even without a GPU."""
    torch = importlib.import_module("torch")
    if (torch.ones(4, 4) @ torch.ones(4, 4)).sum().item() != 64:
        raise Smoke("torch cannot multiply")
    built = torch.version.cuda is not None
    if built != (device == "cuda"):
        raise Smoke(f"torch {torch.__version__} is built for CUDA: {built}, wanted: {device}")


def check_faiss(device: str) -> None:
    """Check that faiss finds vectors, and in a build for GPUs has their code, even without one."""
    faiss, numpy = (importlib.import_module(name) for name in ("faiss", "numpy"))
    vectors = numpy.eye(4, dtype=numpy.float32)
    index = faiss.IndexFlatL2(4)
    index.add(vectors)
    if index.search(vectors, 1)[1].ravel().tolist() != [0, 1, 2, 3]:
        raise Smoke("faiss does not find what is in its index")
    built = hasattr(faiss, "StandardGpuResources")
    if built != (device == "cuda"):
        raise Smoke(f"faiss {faiss.__version__} is built for GPUs: {built}, wanted: {device}")


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Prove what an image holds, and what not.")
    parser.add_argument("stage")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--version", required=True, help="that of trainyard")
    parser.add_argument("--locks", type=Path, default=LOCKS)
    given = parser.parse_args()
    stage, cuda = given.stage, given.device == "cuda"

    text = Path(given.locks, "cuda" if cuda else ".", f"{stage}.txt").read_text()
    lock = {normal(name): version for name, version in PINNED.findall(text)}
    extras = EXTRAS.match(text)
    if extras is None or not lock:
        raise Smoke(f"the lock of {stage} names no extras or no packages")
    has_torch, has_faiss = stage in TORCH_STAGES, FAISS[given.device] in lock
    on_nvidias = cuda and not has_faiss
    check_versions(lock, {"trainyard", *(["torch"] if has_torch else [])}, exact=not on_nvidias)
    if (here := metadata.version("trainyard")) != given.version:
        raise Smoke(f"holds trainyard {here}, wanted {given.version}")

    absent: tuple[str, ...] = () if on_nvidias else NEVER + ACCELERATED
    absent += () if has_torch else ("torch",)
    absent += () if has_faiss else ("faiss",)
    absent += () if stage == "flow" else ("prefect",)
    check_absent(absent)
    if has_torch:
        check_torch(given.device)
    if has_faiss:
        check_faiss(given.device)
    wanted = wanted_packages(extras[1].split())
    check_floors(wanted, lock)
    tried = import_all(wanted & lock.keys())
    if on_nvidias:
        for module in ACCELERATED:
            importlib.import_module(module)
    if stage == "flow":
        tried += import_flows()
    else:
        check_stage(stage)
    print(f"{stage}: {len(lock)} packages as locked, {tried} modules imported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
