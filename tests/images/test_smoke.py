"""The smoke test of an image refuses an environment that is not what a lock says."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from images import smoke
from trainyard.version import VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def trainyard_as_pyproject_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's metadata as an installation writes them; a checkout may stand on none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"Requires-Dist: {line}" for line in project["dependencies"]]
    for extra, wanted in project["optional-dependencies"].items():
        for line in wanted:
            head, _, marker = line.partition(";")
            both = f"({marker.strip()}) and " if marker else ""
            lines.append(f'Requires-Dist: {head.strip()} ; {both}extra == "{extra}"')
    folder = tmp_path / f"trainyard-{VERSION}.dist-info"
    folder.mkdir()
    head = f"Metadata-Version: 2.1\nName: trainyard\nVersion: {VERSION}\n"
    (folder / "METADATA").write_text(head + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_too_much_is_named() -> None:
    with pytest.raises(smoke.Smoke, match=r"in the image and not in the lock.*'pytest'"):
        smoke.check_versions({}, set(), exact=True)


def test_another_version_is_named() -> None:
    with pytest.raises(smoke.Smoke, match="numpy"):
        smoke.check_versions({"numpy": "0.1"}, set(), exact=False)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(smoke.Smoke, match="no-such-package"):
        smoke.check_versions({}, {"no-such-package"}, exact=False)


def test_a_lock_that_fits_passes() -> None:
    smoke.check_versions({"numpy": metadata.version("numpy")}, {"trainyard"}, exact=False)


def test_a_forbidden_module_is_named() -> None:
    smoke.check_absent(("no_such_module",))
    with pytest.raises(smoke.Smoke, match="numpy"):
        smoke.check_absent(("no_such_module", "numpy"))


def test_first_package_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = tmp_path / "first" / "numpy-0.0.1.dist-info"
    shadow.mkdir(parents=True)
    (shadow / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    assert smoke.installed()["numpy"] != "0.0.1"
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    assert smoke.installed()["numpy"] == "0.0.1"


def test_extras_are_followed_into_each_other() -> None:
    assert {"tokenizers", "pyarrow", "nltk"} <= smoke.wanted_packages(["tokenize"])
    assert "prefect" not in smoke.wanted_packages(["tokenize", "s3"])
    assert smoke.wanted_packages(["plan"]) == set()


def test_an_older_package_of_the_base_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke.check_floors({"numpy"}, lock={})
    monkeypatch.setattr(metadata, "version", lambda name: "1.26.4")
    smoke.check_floors({"numpy"}, lock={"numpy": "2.4.6"})
    with pytest.raises(smoke.Smoke, match=r"numpy is 1\.26\.4"):
        smoke.check_floors({"numpy"}, lock={})


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0a0+145a.nv26.6", (2, 13, 0)), ("84.2.1", (84, 2, 1))]
)
def test_numbers_of_a_version(version: str, numbers: tuple[int, ...]) -> None:
    assert smoke.release(version) == numbers


def test_this_environment_fails_the_smoke_test() -> None:
    command = [sys.executable, smoke.__file__, "collect", "--device", "cpu", "--version", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "not in the lock" in result.stderr


# --- a CUDA image, as far as it can be had without one ------------------------------------------

STAGE = "reshard"
Main = Callable[..., int]


@pytest.fixture
def on_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """`smoke.main` on what NVIDIA's image brings: a torch for CUDA, and modules that are empty
    here. The lock and all else are real."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    brought = tmp_path / "brought"
    for module in smoke.ACCELERATED:
        (brought / module).mkdir(parents=True)
        (brought / module / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(brought))
    for module in ("faiss", "prefect"):
        monkeypatch.setitem(sys.modules, module, None)  # the tests have it, an image has not
    real = Path(smoke.LOCKS, "cuda", f"{STAGE}.txt").read_text()
    pins = {name: metadata.version(name) for name, _ in smoke.PINNED.findall(real)}

    def main(missing: str = "", stage: str = STAGE, **other_pins: str) -> int:
        if missing:
            (brought / missing / "__init__.py").unlink()
            (brought / missing).rmdir()
        folder = tmp_path / "locks" / "cuda"
        folder.mkdir(parents=True)
        lines = [f"{name}=={version} \\" for name, version in (pins | other_pins).items()]
        (folder / f"{stage}.txt").write_text("\n".join([real.splitlines()[0], *lines]) + "\n")
        given = ["smoke.py", stage, "--device", "cuda", "--version", VERSION]
        monkeypatch.setattr(sys, "argv", [*given, "--locks", str(folder.parent)])
        return smoke.main()

    return main


def test_cuda_image_passes(on_nvidias: Main, capsys: pytest.CaptureFixture[str]) -> None:
    """It may hold more than its lock: here it does."""
    assert on_nvidias() == 0
    assert "packages as locked" in capsys.readouterr().out
    assert set(smoke.ACCELERATED) <= sys.modules.keys()


@pytest.mark.parametrize("module", smoke.ACCELERATED)
def test_a_cuda_image_without_what_nvidia_brings_is_refused(on_nvidias: Main, module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=module):
        on_nvidias(missing=module)


def test_cuda_image_with_cpu_torch_fails(on_nvidias: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(smoke.Smoke, match="built for CUDA: False, wanted: cuda"):
        on_nvidias()


def test_cuda_image_with_prefect_fails(on_nvidias: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "prefect")
    with pytest.raises(smoke.Smoke, match=r"must not be in this image.*prefect"):
        on_nvidias()


def test_a_cuda_image_with_another_version_than_locked_is_refused(on_nvidias: Main) -> None:
    with pytest.raises(smoke.Smoke, match=r"not as the lock has them.*safetensors"):
        on_nvidias(safetensors="0.0.1")


def test_an_image_with_faiss_for_gpus_is_held_to_its_lock(on_nvidias: Main, tmp_path: Path) -> None:
    """It stands on none of NVIDIA's, so there is nothing in it but what the lock has."""
    folder = tmp_path / "brought" / "faiss_gpu-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: faiss-gpu\nVersion: 1.0\n")
    with pytest.raises(smoke.Smoke, match=r"in the image and not in the lock.*pytest"):
        on_nvidias(stage="faiss-train", **{"faiss-gpu": "1.0"})
