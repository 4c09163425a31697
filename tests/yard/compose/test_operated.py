"""The commands of docs/operate.md: new secrets, backup, restore, upgrade.

They run in a checkout of their own, whose .env names this project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.yard.compose.composed import STAGES, Run, api, begin
from tests.yard.compose.engine import REGISTRY, Compose, docker, engine
from tests.yard.faults.faults import logs, steps
from tests.yard.operator.deployed import ENDED, comes
from tests.yard.yard import ROOT
from trainyard.version import VERSION

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(1500)]

PAGE = (ROOT / "docs" / "operate.md").read_text()
ITERATION = re.compile(r"iteration +(\d+)/")
NEXT_VERSION = f"{VERSION}.post1"
SECONDS = 1200
CANCELLED_SECONDS = 120
"""From Cancel until nothing of a run is left, on a busy machine."""
BEGUN_SECONDS = 400
"""From a request, or the start of a worker, until a container trains, on a busy machine."""
ENDLESS = 150_000
"""Iterations that take longer than an upgrade."""
HEALTHY = dict.fromkeys(("browse", "postgres", "server", "store", "worker"), "healthy")
CHECKED_OUT = (
    *("LICENSE", "README.md", "Makefile", "pyproject.toml", "constraints.txt", "prefect.yaml"),
    *("docker-compose.yml", ".dockerignore", ".gitignore"),
    *("deploy", "docs", "flows", "images", "recipes", "stages", "trainyard"),
)


def blocks(heading: str) -> list[str]:
    """The commands below a heading, block by block."""
    section = re.split(rf"^#+ {heading}$", PAGE, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", re.sub(r"^# ", "\0", section, flags=re.MULTILINE), flags=re.M)[0]
    return re.findall(r"^```sh\n(.*?)^```$", section.replace("\0", "# "), re.DOTALL | re.M)


@dataclass
class Operated:
    """A checkout with a yard that is up."""

    compose: Compose
    origin: Path

    @property
    def checkout(self) -> Path:
        return self.compose.folder / "checkout"

    def type(self, script: str) -> str:
        """Run commands there as a person would; what they print."""
        # The page names the volume of a yard whose project is `trainyard`.
        script = script.replace(" trainyard_database", f" {self.compose.project}_database")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.checkout,
            env={**os.environ, **self.compose.variables, "IMAGES": " ".join(("flow", *STAGES))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"
        return done.stdout

    def knows(self, flow: str) -> bool:
        """Whether the server knows a flow of that name."""
        try:
            return bool(api(self.compose).ask(f"flows/name/{flow}"))
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return False

    def tell(self, flow: str) -> None:
        """Let the server know a flow of that name."""
        api(self.compose).ask("flows/", {"name": flow})

    def jobs(self) -> list[str]:
        """Containers of stages that run."""
        ours = ("--filter", f"volume={self.compose.home}", "--filter", "name=trainyard-")
        return docker("ps", "--quiet", *ours).stdout.split()

    def states(self) -> dict[str, str]:
        """Of the services that run."""
        return {name: state for name, state in self.compose.states().items() if name in HEALTHY}


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    folder.chmod(0o755)
    origin, checkout = folder / "origin", folder / "checkout"
    origin.mkdir()
    for name in CHECKED_OUT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, origin / name)
    git(origin, "init", "--quiet")
    git(origin, "add", "--all")
    git(origin, "commit", "--quiet", "--message", "as it is")
    git(folder, "clone", "--quiet", str(origin), str(checkout))
    for wheel in (ROOT / "images" / "wheels").glob("*.whl"):
        shutil.copy2(wheel, checkout / "images" / "wheels")  # in no commit
    project = f"yard-test-{uuid.uuid4().hex[:6]}"
    with engine() as variables:
        yard = Operated(Compose(project, folder, variables), origin)
        yard.compose.settings.symlink_to(checkout / ".env")
        settings = {
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_FILE": "docker-compose.yml:deploy/dev/compose.yml",
            "YARD_HOME": str(yard.compose.home),
            "YARD_NETWORK": project,
            "YARD_UI_PORT": "0",
            "YARD_BROWSE_PORT": "0",
            "YARD_S3_PORT": "0",
            "TRAINYARD_REGISTRY": REGISTRY,
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        (checkout / ".env").write_text("".join(lines))
        try:
            yard.type("make env images\nmake up")
            yield yard
        finally:
            yard.compose.down()
            newer = docker("image", "ls", "--quiet", f"{REGISTRY}/*:{NEXT_VERSION}").stdout.split()
            docker("image", "rm", "--force", *dict.fromkeys(newer), check=False)


def test_no_block_of_these_sections_is_left_out() -> None:
    found = {name: len(blocks(name)) for name in ("New secrets", "Upgrade", "Backup")}
    assert found == {"New secrets": 3, "Upgrade": 1, "Backup": 3}


# --- new secrets ----------------------------------------------------------------------------------


def test_a_new_password_of_prefect(operated: Operated) -> None:
    before = api(operated.compose)
    assert before.ask("flows/count", {}) >= 0
    operated.type(blocks("New secrets")[0])
    assert operated.states() == HEALTHY
    after = api(operated.compose)
    before.url = after.url
    with pytest.raises(urllib.error.HTTPError, match="401"):
        before.ask("flows/count", {})
    assert after.ask("flows/count", {}) > 0  # those of the yard, registered before
    worker = "work_pools/compose/workers/filter"
    assert comes(60, lambda: "ONLINE" in {one["status"] for one in after.ask(worker, {})})


def test_a_new_secret_of_the_store(operated: Operated) -> None:
    before = operated.compose.secret("YARD_S3_SECRET")
    operated.type(blocks("New secrets")[1])
    assert operated.states() == HEALTHY
    assert operated.compose.states()["bucket"] == "exit 0"
    has = operated.type("docker compose exec -T worker printenv AWS_SECRET_ACCESS_KEY").strip()
    assert has == operated.compose.secret("YARD_S3_SECRET") != before


CONNECT = """docker compose exec -T server python -c '
import asyncio, asyncpg, sys
try:
    asyncio.run(asyncpg.connect("postgresql://prefect:{password}@postgres/prefect"))
except asyncpg.InvalidPasswordError:
    print("refused")
'"""


def test_a_new_password_of_the_database(operated: Operated) -> None:
    operated.tell("older")
    before = operated.compose.secret("POSTGRES_PASSWORD")
    operated.type(blocks("New secrets")[2])
    assert operated.states() == HEALTHY
    assert operated.knows("older")
    after = operated.compose.secret("POSTGRES_PASSWORD")
    assert operated.type(CONNECT.format(password=before)) == "refused\n"
    assert operated.type(CONNECT.format(password=after)) == ""


# --- backup and restore ---------------------------------------------------------------------------


def test_a_dump_brings_back_what_was_known_when_it_was_made(operated: Operated) -> None:
    dump, over, anew = blocks("Backup")
    operated.tell("kept")
    operated.type(dump)
    operated.tell("later")
    operated.type(over)
    assert operated.states() == HEALTHY
    assert operated.knows("kept")
    assert not operated.knows("later")

    operated.tell("later")
    operated.type(anew)
    assert operated.states() == HEALTHY
    assert operated.knows("kept")
    assert not operated.knows("later")
    there = api(operated.compose).ask("deployments/name/pretrain-gpt/compose")
    assert there["work_pool_name"] == "compose"


# --- upgrade --------------------------------------------------------------------------------------


def logs_of(run: Run) -> list[Path]:
    """Of its training, attempt after attempt."""
    return sorted(run.folder.glob("pretrain/*/log.txt"))


def iterations(log: Path) -> list[int]:
    """The steps in a log."""
    return [int(step) for step in ITERATION.findall(log.read_text())]


@pytest.mark.timeout(2400)  # it builds every image again
def test_an_upgrade_in_the_middle_of_a_run(operated: Operated) -> None:
    source = operated.origin / "trainyard" / "version.py"
    source.write_text(source.read_text().replace(f'"{VERSION}"', f'"{NEXT_VERSION}"'))
    git(operated.origin, "commit", "--quiet", "--all", "--message", "the next version")
    operated.tell("kept")
    run = begin(operated.compose, "upgraded", ENDLESS, saves=500)
    assert comes(BEGUN_SECONDS, lambda: bool(steps(run.checkpoint)))
    operated.type(blocks("Upgrade")[0])

    assert operated.states() == HEALTHY
    assert operated.knows("kept")
    assert operated.compose.secret("TRAINYARD_VERSION") == NEXT_VERSION
    containers = json.loads(
        docker("inspect", *run.yard.run("ps", "-q", "worker").stdout.split()).stdout
    )
    assert containers[0]["Config"]["Image"] == f"{REGISTRY}/flow:{NEXT_VERSION}"
    assert "asked to stop" in logs(run.folder)
    assert comes(BEGUN_SECONDS, lambda: len(logs_of(run)) == 2), run.yard.run(
        "logs", "worker"
    ).stdout
    first, second = logs_of(run)
    assert comes(BEGUN_SECONDS, lambda: bool(iterations(second))), run.yard.run(
        "logs", "worker"
    ).stdout
    reached = iterations(first)[-1]
    assert reached < iterations(second)[0] <= reached + 100  # it goes on by itself
    began = time.monotonic()
    api(operated.compose).cancel(run.id)
    over = comes(CANCELLED_SECONDS, lambda: run.state() in ENDED and not operated.jobs())
    print(f"all of the run has ended after {time.monotonic() - began:.1f} s")
    assert over, run.yard.run("logs", "--tail", "60", "worker").stdout
    assert run.state() == "CANCELLED"
