"""The CPU images, built and run on a real engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.smoke import PINNED, normal
from tests.yard.compose.engine import REGISTRY, Compose, compose, docker, engine
from tests.yard.yard import ROOT, write_corpus
from trainyard.version import VERSION

pytestmark = [pytest.mark.yard, pytest.mark.timeout(1200)]

TORCH = ("pretrain", "evaluate")
CONFINED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
STOP_SECONDS = 5
BEGUN_SECONDS = 60
TORCH_BYTES = 400_000_000


def image(name: str) -> str:
    return f"{REGISTRY}/{name}:{VERSION}"


def inspected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(docker("image", "inspect", image(name)).stdout)[0]
    return document


def inside(name: str, *command: str) -> str:
    """What a command prints in an image that is confined as the yard confines it."""
    return docker("run", "--rm", *CONFINED, image(name), *command).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with engine() as variables, compose(tmp_path_factory.mktemp("images"), variables) as project:
        project.build("tokenize", "flow")
        yield project


def test_a_stage_on_local_folders_starts_nothing_else(project: Compose) -> None:
    assert project.secret("COMPOSE_PROFILES") == "store"
    write_corpus(project.home / "corpus.jsonl", count=20, seed=8)
    options = ("--tokenizer-type", "ByteLevelTokenizer", "--append-eod")
    project.stage("tokenize", "--input", "corpus.jsonl", "--output-prefix", "t", *options)
    assert (project.home / "t.manifest.json").exists()
    assert project.states() == {}


@pytest.fixture(scope="module")
def torch_project(project: Compose) -> Compose:
    project.build(*TORCH)
    return project


def test_no_argument_and_options_alone_are_those_of_the_stage(project: Compose) -> None:
    for arguments, words in (((), "tokenize: --input"), (("--help",), "stages.tokenize")):
        done = docker("run", "--rm", *CONFINED, image("tokenize"), *arguments, check=False)
        assert words in done.stdout + done.stderr
    assert inside("tokenize", "python", "-c", "print(6 * 7)") == "42\n"


def test_an_image_is_not_root_and_writes_in_tmp_alone(project: Compose) -> None:
    assert inside("tokenize", "id", "-u") == "10001\n"
    tried = (
        "touch /tmp/a && for d in /opt/trainyard /usr /yard /; do touch $d/a && exit 9; done; true"
    )
    docker(
        "run",
        "--rm",
        "--tmpfs",
        "/tmp",
        "--entrypoint",
        "sh",
        "--read-only",
        image("tokenize"),
        "-c",
        tried,
    )


NUMBERS = " ".join(str(number % 250) for number in range(2000))
DOCUMENTS = 15_000
"""Of these numbers: ten seconds of work for one process."""


def test_sigterm_stops_a_stage_and_a_rerun_resumes(project: Compose, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    out.mkdir()
    out.chmod(0o777)  # for whoever the image's user is
    (text / "a.jsonl").write_text((json.dumps({"text": NUMBERS}) + "\n") * DOCUMENTS)
    folders = ("--volume", f"{text}:/text:ro", "--volume", f"{out}:/out")
    arguments = ("--input", "/text", "--output-prefix", "/out/corpus", "--workers", "1")
    arguments = (*arguments, "--tokenizer-type", "NullTokenizer", "--vocab-size", "251")
    command = (*CONFINED, *folders, image("tokenize"), *arguments, "--log-interval", "100")

    name = docker("run", "--detach", *command).stdout.strip()
    try:
        deadline = time.monotonic() + BEGUN_SECONDS
        while "tokenized documents=" not in docker("logs", name).stderr:
            assert time.monotonic() < deadline, docker("logs", name).stderr
            time.sleep(0.05)
        began = time.monotonic()
        docker("stop", "--time", "60", name)
        assert time.monotonic() - began < STOP_SECONDS
        log = docker("logs", name).stderr
        ended = docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout
    finally:
        docker("rm", "--force", name)
    assert (ended, log.splitlines()[-1][9:]) == (
        f"{128 + signal.SIGTERM}\n",
        "warning tokenize: stopped by SIGTERM; nothing incomplete was published",
    )
    assert [path.name for path in out.iterdir()] == ["corpus.work"]  # and no claim on it

    again = docker("run", "--rm", *command).stderr
    assert re.search(r"resuming: units_done=[1-9]", again)
    verify = [sys.executable, "-m", "stages.verify", str(out)]
    verified = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True)
    assert "in 1 artifacts: all as published" in verified.stdout, verified.stderr


@pytest.mark.parametrize("name", ["tokenize", "flow"])
def test_an_image_says_what_it_is(project: Compose, name: str) -> None:
    labels = inspected(name)["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == project.secret("TRAINYARD_REVISION")
    assert labels["trainyard.stage"] == name


@pytest.mark.parametrize("name", ["tokenize", "flow"])
def test_the_bill_of_materials_names_the_lock_and_debian(project: Compose, name: str) -> None:
    bill = json.loads(inside(name, "cat", "/usr/share/trainyard/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {(normal(one["name"]), one["version"]) for one in bill["components"]}
    pins = set(PINNED.findall((ROOT / "images" / "locks" / f"{name}.txt").read_text()))
    assert len(pins) > 20
    assert {(normal(pin), version) for pin, version in pins} <= listed
    assert ("trainyard", VERSION) in listed
    debian = "pkg:deb/debian/libc6@"
    (libc,) = [one for one in bill["components"] if one.get("purl", "").startswith(debian)]
    assert libc["purl"].endswith("&distro=debian-12")
    systems = [one for one in bill["components"] if one["type"] == "operating-system"]
    assert [(one["name"], one["version"]) for one in systems] == [("debian", "12")]


def smoke(name: str, claimed: str) -> tuple[int, str]:
    """The smoke test of one stage in the image of another: exit status and output."""
    folder = ROOT / "images"
    command = ("python", "/images/smoke.py", claimed, "--device", "cpu", "--version", VERSION)
    done = docker(
        "run", "--rm", *CONFINED, "-v", f"{folder}:/images:ro", image(name), *command, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_smoke_test_knows_too_much_from_too_little(project: Compose) -> None:
    assert smoke("tokenize", "tokenize")[0] == 0
    status, output = smoke("tokenize", "merge")
    assert status != 0
    assert "in the image and not in the lock" in output
    assert "pyarrow" in output
    status, output = smoke("tokenize", "flow")
    assert status != 0
    assert "not as the lock has them" in output
    assert "prefect" in output


@pytest.mark.full
def test_images_with_torch_share_its_layer(torch_project: Compose) -> None:
    layers = [inspected(name)["RootFS"]["Layers"] for name in TORCH]
    shared = [one for one, other in zip(*layers, strict=False) if one == other]
    assert layers[0] != layers[1]
    history = docker("history", "--human=false", "--format", "{{.Size}}", image("pretrain")).stdout
    sizes = [int(size) for size in reversed(history.split()) if int(size)]  # oldest first
    torch = sizes.index(max(sizes))
    assert sizes[torch] > TORCH_BYTES
    assert len(shared) > torch


@pytest.mark.full
@pytest.mark.parametrize("name", TORCH)
def test_torch_computes_as_nobody_on_a_read_only_disk(torch_project: Compose, name: str) -> None:
    output = inside(
        name, "python", "-c", "import torch; print(torch.version.cuda, torch.ones(2).sum())"
    )
    assert output == "None tensor(2.)\n"


FAISS = """
services:
  faiss:
    image: {registry}/faiss-train:{version}
    build: {{context: {root}, dockerfile: images/cpu.Dockerfile, target: stage, args: {cpu}}}
  faiss-cuda:
    image: {registry}/faiss-train:{version}-cuda
    build: {{context: {root}, dockerfile: images/cpu.Dockerfile, target: faiss-gpu, args: {cuda}}}
"""
SEARCH = """
import importlib.util as u, faiss
print(hasattr(faiss, "StandardGpuResources"), *(u.find_spec(name) is not None for name in
      ("torch", "transformer_engine", "prefect")))
"""


@pytest.mark.full
def test_faiss_for_cpus_and_for_gpus_has_nothing_else(project: Compose, tmp_path: Path) -> None:
    """Both builds run the smoke test, which searches with it."""
    python = project.variables["PYTHON_IMAGE"]
    cpu = {"PYTHON_IMAGE": python, "STAGE": "faiss-train", "VERSION": VERSION}
    cuda = json.dumps({**cpu, "LOCK": "cuda/faiss-train"})
    more = tmp_path / "faiss.yml"
    more.write_text(
        FAISS.format(registry=REGISTRY, version=VERSION, root=ROOT, cpu=json.dumps(cpu), cuda=cuda)
    )
    project.run("-f", str(more), "build", "faiss", "faiss-cuda", seconds=900)
    assert inside("faiss-train", "python", "-c", SEARCH) == "False False False False\n"
    on_gpus = f"{image('faiss-train')}-cuda"
    of_gpu = docker("run", "--rm", *CONFINED, on_gpus, "python", "-c", SEARCH)
    assert of_gpu.stdout == "True False False False\n"


@pytest.mark.full
def test_every_image_builds_and_is_a_service(project: Compose) -> None:
    services = project.run("--profile", "*", "config", "--services").stdout.split()
    project.build(*sorted(set(services) - {"postgres", "store", "bucket", "server", "worker"}))
    made = docker("image", "ls", "--format", "{{.Repository}}", f"{REGISTRY}/*").stdout.split()
    stages = {path.parent.name for path in Path(ROOT, "stages").glob("*/__main__.py")}
    assert {name.removeprefix(f"{REGISTRY}/") for name in made} >= {
        stage.replace("_", "-") for stage in stages
    } | {"flow"}
    for stage in stages:
        help_text = project.stage(stage.replace("_", "-"), "--help").stdout
        assert f"stages.{stage}" in help_text
        assert "--config" in help_text
