"""The locks agree with pyproject.toml, with constraints.txt, with the services and the Makefile."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images import lock as locking
from images import smoke

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "images" / "locks"
STAGES = {path.parent.name.replace("_", "-") for path in Path(ROOT, "stages").glob("*/__main__.py")}
IMAGES = [lock for lock in locking.locks() if lock.extras and not lock.is_universal]
CPU = [lock for lock in IMAGES if not lock.name.startswith("cuda/")]


def text(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text()


def pins(name: str) -> dict[str, str]:
    return {smoke.normal(key): version for key, version in smoke.PINNED.findall(text(name))}


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@cache
def required(name: str, extra: str) -> list[Requirement]:
    """What an installed package with this extra, or with the extra "", requires here."""
    environment = {**default_environment(), "extra": extra}
    found = [Requirement(line) for line in metadata.requires(name) or []]
    return [one for one in found if not one.marker or one.marker.evaluate(environment)]


def closure(extras: tuple[str, ...]) -> set[str]:
    """What an installation with these extras brings, from what is installed here."""
    optional = project()["optional-dependencies"]
    waiting = [Requirement(line) for line in project()["dependencies"]]
    waiting += [Requirement(line) for extra in extras for line in optional[extra]]
    reached: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == "trainyard":
            waiting += [Requirement(line) for extra in wanted.extras for line in optional[extra]]
            continue
        for extra in {"", *wanted.extras} - {extra for one, extra in reached if one == name}:
            reached.add((name, extra))
            waiting += required(name, extra)
    return {name for name, _ in reached}


def test_every_stage_has_a_lock_and_a_service_with_its_arguments() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {lock.name for lock in CPU} == STAGES | {"flow"}
    for stage in STAGES:
        arguments = services[stage]["build"]["args"]
        assert arguments["STAGE"] == stage
        has_torch = arguments.get("PACKAGES") == "torch-packages"
        assert has_torch == (stage in locking.TORCH)
        assert services[stage]["image"].endswith(f"/{stage}:${{TRAINYARD_VERSION}}")


@pytest.mark.parametrize("lock", CPU, ids=lambda lock: lock.name)
def test_a_lock_has_what_the_extras_bring_and_no_more(lock: locking.Lock) -> None:
    assert set(pins(lock.name)) == closure(lock.extras) - {"torch"}


@pytest.mark.parametrize("lock", IMAGES, ids=lambda lock: lock.name)
def test_versions_are_those_of_the_tests(lock: locking.Lock) -> None:
    constraints = dict(smoke.PINNED.findall(locking.CONSTRAINTS.read_text()))
    pinned = {smoke.normal(name): version for name, version in constraints.items()}
    assert pins(lock.name).items() <= pinned.items()
    assert pins("torch/usual") == {"torch": pinned["torch"]}


def test_an_installation_gets_every_package_by_hash() -> None:
    constraints = {
        smoke.normal(k): v for k, v in smoke.PINNED.findall(locking.CONSTRAINTS.read_text())
    }
    pinned = pins("install")
    assert pinned.keys() >= closure(("all", "dev")) - {"torch"}
    elsewhere = set(re.findall(r"^([a-z0-9.-]+)==\S+ ;", text("install"), re.MULTILINE))
    for name, version in {**pinned, **pins("pip")}.items():
        assert constraints.get(name) == version or name in elsewhere, name


def test_libraries_of_cuda_are_beside_all_that_any_torch_needs() -> None:
    libraries = pins("cuda/install")
    assert libraries.keys() >= {"nvidia-cublas", "nvidia-nccl-cu13", "triton"}
    assert not libraries.keys() & pins("install").keys()
    assert set(locking.BESIDE_TORCH) <= pins("install").keys()


@pytest.mark.parametrize("path", sorted(LOCKS.rglob("*.txt")), ids=lambda path: path.stem)
def test_every_package_has_hashes(path: Path) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", path.read_text())
    packages = [entry for entry in entries if smoke.PINNED.match(entry)]
    assert packages
    assert all("--hash=sha256:" in entry for entry in packages)


def test_heavy_packages_are_where_they_belong_alone() -> None:
    for lock in IMAGES:
        names = pins(lock.name)
        assert "torch" not in names
        assert ("prefect" in names) == (lock.name == "flow")
        assert not {"transformer-engine", "pytest"} & names.keys()
        if "faiss" not in lock.name and lock.name not in ("retro-import", "retro-preprocess"):
            assert not set(smoke.FAISS.values()) & names.keys()
    assert {"pyarrow", "tokenizers"} <= pins("tokenize").keys()
    assert not {"pyarrow", "tokenizers", "numpy"} & pins("plan").keys()


def test_faiss_for_gpus_brings_cuda_and_is_else_that_for_cpus() -> None:
    names = ("merge", "faiss-train", "cuda/faiss-train")
    plain, of_cpu, of_gpu = (pins(name).items() for name in names)
    assert {name for name, _ in of_cpu - plain} == {"faiss-cpu", "h5py", "packaging"}
    more = {name for name, _ in of_gpu - of_cpu}
    assert {name for name in more if not name.startswith("nvidia-")} == {"faiss-gpu"}
    assert more >= {"nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12", "nvidia-curand-cu12"}
    assert of_gpu >= plain
    for stage in locking.FAISS_GPU:
        of_stage = pins(f"cuda/{stage}")
        assert of_stage["faiss-gpu"] == pins(stage)["faiss-cpu"]
        assert pins(stage).keys() - of_stage.keys() == {"faiss-cpu"}


def test_a_cuda_lock_leaves_alone_what_nvidia_built() -> None:
    for stage in locking.TRAINING:
        assert not set(locking.NGC) & pins(f"cuda/{stage}").keys()
        assert pins(f"cuda/{stage}").keys() < pins(stage).keys()


def test_cuda_services_are_those_with_a_lock() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.cuda.yml").read_text())["services"]
    assert set(services) == set(locking.TRAINING)
    assert all(one["image"].endswith("-cuda") for one in services.values())


def test_nvidias_image_is_pinned_by_digest_in_one_place() -> None:
    found = [
        line
        for path in ROOT.rglob("images/*Dockerfile")
        for line in path.read_text().splitlines()
        if "nvcr.io/" in line
    ]
    assert len(found) == 1
    assert re.search(r"pytorch:\d\d\.\d\d-py3@sha256:[0-9a-f]{64}$", found[0])
