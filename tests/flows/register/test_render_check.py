"""Registration refuses what a block or Prefect would refuse later, before it asks a server."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from flows.register.command import main
from flows.register.deployments import load_flows
from flows.register.desired_state import desired_state
from flows.register.render_check import RENDERERS
from flows.yard.profile import BACKEND_OPTIONS
from flows.yard.read_profile import YARDS, parse_profile, read_document, read_profile

NOBODY = "http://127.0.0.1:9/api"
"""No server listens here, so exit status 2 is found without a server."""

IMAGE = 'image = "r.io/{stage}:{version}"\n'
RUNS = 'run_folder = "/yard/.runs"\n'
CLAIM = '[kubernetes]\nclaims = [{ name = "yard", target = "/yard" }]\n'
NIGHT = 'deployments = ["corpus-refresh"]\n[schedules.corpus-refresh]\ncron = "0 3 * * *"\n'


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", NOBODY)
    monkeypatch.setenv("YARD_HOME", "/srv/yard")
    for name in ("YARD", "YARD_SHARED", "YARD_BUCKET", "TRAINYARD_NOTIFY_URL"):
        monkeypatch.delenv(name, raising=False)


REFUSED: dict[str, tuple[str, str]] = {
    "a container without an image": (
        'block = "container"',
        "block 'container' runs images, and none is named for benchmark, .*write image = ",
    ),
    "a container with an image for one stage": (
        'block = "container"\n[images]\npretrain = "a/b:1"',
        "none is named for benchmark, .*or name one for each stage in [images]",
    ),
    "Kubernetes without an image": (
        f'block = "kubernetes"\n{RUNS}{CLAIM}',
        "block 'kubernetes' runs images",
    ),
    "Kubernetes without claims": (
        f'block = "kubernetes"\n{IMAGE}{RUNS}',
        "run folder /yard/.runs/.* is on no volume .*option claims",
    ),
    "Kubernetes with a claim elsewhere for one stage": (
        f'block = "kubernetes"\n{IMAGE}{RUNS}{CLAIM}'
        '[kubernetes.merge]\nclaims = [{ name = "other", target = "/other" }]',
        "stage merge could not be started: .*(/other)",
    ),
    "an image of Slurm that nothing starts": (
        f'block = "slurm"\n{RUNS}{IMAGE}',
        "image r.io/benchmark.* needs the Slurm option containers, 'pyxis' or 'apptainer'",
    ),
    "mounts of Slurm without an image": (
        f'block = "slurm"\n{RUNS}[[mounts]]\nsource = "/a"\ntarget = "/a"',
        "mounts are for images, and it has none",
    ),
    "a run folder that Slurm cannot write": (
        'block = "slurm"\nrun_folder = "/my yard/.runs"',
        "run folder '/my yard/.runs.*choose another",
    ),
    "a container on two nodes": (
        f'block = "container"\n{IMAGE}[resources.pretrain]\nnodes = 2',
        "stage pretrain could not be started: .*nodes (2): a container runs on one machine",
    ),
    "other GPUs of a container than asked for": (
        f'block = "container"\n{IMAGE}[container.pretrain]\ngpus = ["0", "1"]',
        "stage pretrain could not be started: .*gpus_per_node (0) must be the number of GPUs",
    ),
    "shares on two nodes": (
        f'block = "slurm"\n{RUNS}[shares]\ntokenize = 4\n[resources.tokenize]\nnodes = 2',
        "stage tokenize could not be started: .*shares exclude nodes (2)",
    ),
    "a secret among the variables": (
        '[environment]\nWANDB_API_KEY = "x"',
        "WANDB_API_KEY looks like a secret",
    ),
    "an image that is no reference": (
        'block = "container"\nimage = "a b"',
        "'a b' is not a reference to an image",
    ),
    "grace until Prefect kills": (
        "[watch]\ngrace_seconds = 60",
        "[watch]: grace_seconds (60) must be under 30: .*Prefect's worker kills",
    ),
    "grace of a stage until Prefect kills": (
        "[watch.pretrain]\ngrace_seconds = 30",
        "[watch.pretrain]: grace_seconds (30) must be under 30",
    ),
    "a pool that runs nothing": (
        "[pool]\nconcurrency_limit = 0",
        "[pool]: concurrency_limit must be at least 1",
    ),
    "a pool's name that Prefect refuses": (
        '[pool]\nname = "a/b"',
        "[pool]: Prefect does not accept name 'a/b'",
    ),
    "a cron of four fields": (
        NIGHT.replace("0 3 * * *", "0 3 * *"),
        "[schedules.corpus-refresh]: cron '0 3 * *' is not valid in Prefect; write minute",
    ),
    "a cron that never fires": (
        NIGHT.replace("0 3 * * *", "0 3 30 2 *"),
        "[schedules.corpus-refresh]: cron '0 3 30 2 *' never fires",
    ),
    "a timezone that there is not": (
        NIGHT + 'timezone = "Europe/Berlim"',
        "[schedules.corpus-refresh]: timezone 'Europe/Berlim' is not valid in Prefect",
    ),
    "a parameter that a flow has not": (
        NIGHT + '[schedules.corpus-refresh.parameters]\nrecip = "a.toml"',
        "[schedules.corpus-refresh.parameters]: unknown key 'recip'; did you mean 'recipe'",
    ),
    "overrides that no run accepts": (
        NIGHT + 'parameters = { overrides = "tokenize.worker = 1" }',
        "[schedules.corpus-refresh.parameters]: overrides: tokenize: unknown key 'worker'",
    ),
    "a parameter of another type": (
        NIGHT + 'parameters = { workers = "x" }',
        "[schedules.corpus-refresh.parameters]: .*'x' is not of type 'integer'",
    ),
    "news for a flow that is not deployed": (
        'deployments = ["run-stage"]\n[automations]\ntrain_on_new_corpus = "a.toml"',
        "[automations]: train_on_new_corpus needs pretrain-gpt among the deployments",
    ),
}


def pattern(words: str) -> str:
    """Words with `.*` for anything, and all else as it is."""

    return ".*".join(map(re.escape, words.split(".*")))


@pytest.mark.few_cases(10)
@pytest.mark.parametrize("what", REFUSED)
def test_bad_yard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    text, words = REFUSED[what]
    file = tmp_path / "mysite.toml"
    file.write_text(text)
    assert main(["--yard", str(file)]) == 2
    stderr = capsys.readouterr().err

    assert re.search(pattern(f"error: {file}: yard mysite.*{words}"), stderr), stderr
    assert "Traceback" not in stderr


def test_what_can_be_is_loaded_with_its_schedule() -> None:
    text = NIGHT + 'timezone = "Europe/Berlin"\nparameters = { recipe = "a.toml" }'
    document = tomllib.loads(text)
    plan = desired_state(parse_profile(document, "site"), document, {})
    (flow,) = load_flows(plan).values()
    assert flow.name == "corpus-refresh"


def test_a_yard_has_a_valid_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my site.toml"
    file.write_text("")
    assert main(["--yard", str(file)]) == 2
    assert f"{file}: yard 'my site': a yard has the name of its file" in capsys.readouterr().err


def test_bad_chat_url(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRAINYARD_NOTIFY_URL", "hooks.chat.org/geheim")
    assert main(["--yard", "local"]) == 2
    stderr = capsys.readouterr().err
    assert "TRAINYARD_NOTIFY_URL is not a URL" in stderr
    assert "geheim" not in stderr


@pytest.mark.parametrize("name", sorted(file.stem for file in YARDS.glob("*.toml")))
def test_a_profile_that_comes_with_trainyard_can_be_registered(name: str) -> None:
    made = desired_state(read_profile(name), read_document(name), {})
    assert made.deployments


def test_every_block_is_rehearsed() -> None:
    assert set(RENDERERS) == set(BACKEND_OPTIONS)


def test_a_stage_may_have_what_others_lack() -> None:
    """GPUs by their names where the stage asks for so many, claims where all have the yard's."""
    document = {
        "block": "container",
        "image": "r.io/{stage}:{version}",
        "container": {"pretrain": {"gpus": ["0", "1"]}},
        "resources": {"pretrain": {"gpus_per_node": 2}},
    }
    assert desired_state(parse_profile(document, "site"), document, {}).deployments
