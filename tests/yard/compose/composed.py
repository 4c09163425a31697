"""Flow runs in the yard of docker-compose.yml: a long training, the API, the submissions."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.backends.events import read_events
from tests.yard.compose.engine import Compose, compose, engine
from tests.yard.operator.deployed import ENDED, Api, comes
from tests.yard.yard import MODEL, write_corpus

REGISTER = ("python", "-m", "flows.register", "--yard", "compose")
STAGES = ("plan", "tokenize", "merge", "pretrain", "reshard", "evaluate", "benchmark", "report")
"""Those that the recipe below has; each runs in its own image."""
ITERATIONS = 300

SOURCES = """
corpus = ["{home}/docs/*.jsonl"]
evaluation_data = "{home}/held.txt"

[tokenize]
tokenizer_type = "ByteLevelTokenizer"
append_eod = true

[plan]
vocab_size = 300
"""
LONGER = "train_iters = {iterations}\nsave_interval = {saves}"
RECIPE = SOURCES + MODEL.replace("train_iters = 6", LONGER)


@contextmanager
def registered(folder: Path) -> Iterator[Compose]:
    """The yard, up, with its deployments and the images of the recipe."""
    with engine() as variables, compose(folder, variables) as yard:
        yard.build(*STAGES, "flow", "postgres", "store")
        yard.run("up", "--detach", "--wait", "--no-build")
        in_flow_image(yard, *REGISTER)
        yield yard


def in_flow_image(yard: Compose, *command: str, seconds: float = 300) -> str:
    """What a command prints beside the server, in the image of the flows."""
    asked = ("run", "--rm", "--no-deps", "--no-TTY", "flow", *command)
    return yard.run(*asked, seconds=seconds).stdout


def api(yard: Compose) -> Api:
    """The server's API with its password; looked up each time, since a restart moves its port."""
    url = f"http://{yard.address('server', 4200)}/api"
    return Api(url, yard.secret("PREFECT_AUTH"), has_csrf=True)


@dataclass
class Run:
    """A run of the recipe in the yard."""

    yard: Compose
    name: str
    id: str

    @property
    def made(self) -> Path:
        """The folder of its outputs."""
        return self.yard.home / "made" / self.name

    @property
    def checkpoint(self) -> Path:
        """The run folder of its training."""
        return self.made / "checkpoint"

    @property
    def folder(self) -> Path:
        """Where the run folders of its jobs lie, log by log."""
        return self.yard.home / ".runs" / self.name

    def state(self) -> str:
        """The state by the server; empty while its database is away."""
        try:
            return api(self.yard).state(self.id)
        except (urllib.error.HTTPError, TimeoutError):
            return ""

    def ended(self, seconds: float) -> str:
        """The state that it came to; AssertionError with what the worker said when it comes to
        none in time."""
        over = comes(seconds, lambda: self.state() in ENDED)
        assert over, self.yard.run("logs", "--tail", "60", "worker").stdout
        return self.state()

    def submissions(self) -> dict[str, tuple[str, ...]]:
        """The events of each submission, by its job and attempt."""
        found = self.folder.rglob("events.jsonl")
        by_folder = {path.parent: read_events(path.parent) for path in found}
        return {
            f"{folder.parent.name}/{folder.name}": tuple(one.event for one in events)
            for folder, events in by_folder.items()
        }

    def shown(self, key: str) -> str:
        """The newest page of a name that it shows."""
        asked = {"flow_runs": {"id": {"any_": [self.id]}}}
        pages = api(self.yard).ask("artifacts/filter", asked)
        found = [page for page in pages if page["key"] == key]
        return str(max(found, key=lambda page: str(page["created"]))["data"])

    def trained(self) -> list[int]:
        """The steps of its ledger, as often as they were made."""
        lines = [json.loads(line) for line in (self.checkpoint / "ledger.jsonl").open()]
        return [line["step"] for line in lines if line.get("step")]


def begin(yard: Compose, name: str, iterations: int = ITERATIONS, saves: int = 20) -> Run:
    """Ask for a run of a small recipe of that name, which saves every so many steps."""
    (yard.home / name / "docs").mkdir(parents=True)
    write_corpus(yard.home / name / "docs" / "a.jsonl", 60, seed=1)
    text = "the words of the train shunt their own yard before dawn. " * 9
    (yard.home / name / "held.txt").write_text(text)
    recipe = yard.home / f"{name}.toml"
    recipe.write_text(RECIPE.format(home=yard.home / name, iterations=iterations, saves=saves))
    given = {"recipe": str(recipe), "yard": str(yard.home / "made")}
    return Run(yard, name, api(yard).begin("pretrain-gpt/compose", **given))
