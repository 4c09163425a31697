"""Yard profiles: where stages run, with what means, and where all that is made lies.

A profile is one TOML file, deploy/yards/NAME.toml or another by its path; docs/deployments.md
explains every table. The same recipe runs under each of them. No Prefect here."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from flows.backends.spec import Mount, Resources
from flows.recipes.pretrain import Means
from flows.recipes.stage_job import CONFIGS
from flows.runner.retry import FRUITLESS_ATTEMPTS
from flows.yard.place import BLOCK_OPTIONS, Place, Watch
from flows.yard.profile_checks import check_tables
from flows.yard.tables import build, convert, filled_in, refuse_unknown
from trainyard.artifacts import store
from trainyard.artifacts.urls import basename, is_local, join, local_path
from trainyard.config import parse_document
from trainyard.errors import ConfigError, TrainyardError

YARDS = Path(__file__).resolve().parents[2] / "deploy" / "yards"
"""The profiles that come with trainyard."""

DEFAULT = "local"

MOST_RESUMED = 100
"""Of resume_crashed: what is lost more often than that has another fault."""

C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The work pool whose workers run the flows of a yard."""

    name: str
    type: str = "process"
    """A flow only waits for jobs, so a process beside the worker does, everywhere."""
    concurrency_limit: int | None = None
    """Flow runs at once; None: any number."""
    code: str | None = None
    """Folder with trainyard's sources as workers see it; None: that of whoever registers."""

    def __post_init__(self) -> None:
        if self.concurrency_limit is not None and self.concurrency_limit < 1:
            raise ConfigError(
                f"concurrency_limit must be at least 1, or left out for any number, got "
                f"{self.concurrency_limit}: no run would ever begin; to stop a yard for a while, "
                f"pause its pool (prefect work-pool pause {self.name})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a deployment runs by itself."""

    cron: str
    timezone: str = "UTC"
    active: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of these runs, over those of prefect.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Automations:
    """What the server does by itself."""

    zombie_seconds: int = 120
    """A flow run that was not heard of for so long is marked as crashed; 0: never."""
    resume_crashed: int = 3
    """A flow run that crashed because its worker or machine is gone is started again by itself, so
    often at most; 0: it waits for a person's Retry."""
    notify_variable: str = "TRAINYARD_NOTIFY_URL"
    """Variable of whoever registers with the URL that failures are posted to; not set: none is."""
    train_on_new_corpus: str | None = None
    """Recipe that is trained when corpus-refresh has published; None: nothing is."""

    def __post_init__(self) -> None:
        if self.zombie_seconds and self.zombie_seconds < 60:
            raise ConfigError(
                f"zombie_seconds must be 0 or at least 60, got {self.zombie_seconds}: a flow run "
                f"is heard every 30 seconds"
            )
        if not 0 <= self.resume_crashed <= MOST_RESUMED:
            raise ConfigError(
                f"resume_crashed must be from 0 to {MOST_RESUMED}, got {self.resume_crashed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A yard as written."""

    name: str
    block: str = "process"
    """What starts stages: a key of flows.yard.place.BLOCK_OPTIONS."""
    store: str | None = None
    """Root of everything that is made; None: `yard` where the flow runs."""
    browse: str | None = None
    """URL where a browser finds what lies under that root; None: links of pages are file:// and
    s3://, unless variable TRAINYARD_BROWSE says more."""
    run_folder: str | None = None
    """Folder of configs and logs, seen by the jobs; None: `.runs` beside what is made, or under
    ./yard where that is an object store."""
    image: str | None = None
    """What stages run in; `{stage}` and `{version}` stand for theirs. None: what is installed."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Of stages that have another one."""
    python: str | None = None
    """Interpreter of stages; None: that of the flow, or the image's `python`."""
    gpu_memory_gib: float | None = None
    """Of one GPU that trains: a layout that does not fit is refused before training."""
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    resources: Resources = field(default_factory=Resources)
    resources_by_stage: Mapping[str, Resources] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    watch_by_stage: Mapping[str, Watch] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    """Jobs that make one output of a stage together."""
    shares_at_once: int | None = None
    fruitless_attempts: int = FRUITLESS_ATTEMPTS
    """Attempts at a stage in a row without a step gained, after which it is given up."""
    options: Any = None
    """Of the block: SlurmOptions and so on."""
    options_by_stage: Mapping[str, Any] = field(default_factory=dict)
    pool: Pool
    deployments: tuple[str, ...] = ()
    """Flows that are deployed; none named: all of prefect.yaml."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """By flow."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """By stage: jobs at once, over all flows of the yard."""
    automations: Automations = field(default_factory=Automations)

    def __post_init__(self) -> None:
        check_tables(self)

    def yard_root(self, yard: str | None = None) -> str:
        """Folder or URL of all runs: given, else variable YARD, else the profile's, else `yard`."""
        return (yard or os.environ.get("YARD") or self.store or "yard").rstrip("/")

    def means(self) -> Means:
        """What a training gets here, as the plan takes it."""
        return Means(
            world_size=self.resources_of("pretrain").num_processes,
            gpu_memory_gib=self.gpu_memory_gib,
        )

    def resources_of(self, stage: str) -> Resources:
        """What a stage asks for."""
        return self.resources_by_stage.get(stage, self.resources)

    def place(self, root: str) -> Place:
        """Where the stages of a flow run whose artifacts lie under `root`."""
        options = {} if self.options is None else {self.block: self.options}
        return Place(
            run_folder=self._run_folder(root),
            block=self.block,
            environment=dict(self.environment),
            resources=self.resources,
            resources_by_stage=self.resources_by_stage,
            watch=self.watch,
            watch_by_stage=self.watch_by_stage,
            python=self.python or (sys.executable if self.image is None else "python"),
            image=self.image,
            images_by_stage=self.images,
            options_by_stage=self.options_by_stage,
            mounts=self.mounts,
            shares_by_stage=self.shares,
            shares_at_once=self.shares_at_once,
            yard=self.name,
            limited=tuple(self.limits),
            fruitless_attempts=self.fruitless_attempts,
            **options,
        )

    def _run_folder(self, root: str) -> str:
        if self.run_folder is not None:
            return join(self.run_folder, basename(root))
        path = local_path(root) if is_local(root) else Path("yard", basename(root))
        assert path is not None
        return str(path.absolute() / ".runs")


# --- reading ------------------------------------------------------------------------------------

PLAIN = (
    *("store", "run_folder", "image", "python", "gpu_memory_gib", "shares_at_once"),
    *("fruitless_attempts", "browse"),
)
TABLES = ("environment", "images", "mounts", "shares", "limits", "schedules", "automations")


def read_profile(name: str = DEFAULT) -> Profile:
    """Read a profile by its name or path; ConfigError for what is none."""
    document = read_document(name)
    with naming_file(name):
        return parse_profile(document, profile_name(name))


@contextlib.contextmanager
def naming_file(name: str) -> Iterator[None]:
    """ConfigError of what is done meanwhile says in which file the profile was written."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{_url(name)}: {error}") from error


def profile_name(name: str) -> str:
    """What a yard is called, given its name or the path of its profile."""
    return basename(name).removesuffix(".toml")


def read_document(name: str) -> dict[str, Any]:
    """The tables of a profile as they are written."""
    url = _url(name)
    try:
        text = store.read_bytes(url).decode()
    except (TrainyardError, UnicodeDecodeError) as error:
        raise ConfigError(f"yard profile {name} cannot be read: {error}") from error
    return parse_document(text, ".toml", url)


def _url(name: str) -> str:
    if name.endswith(".toml"):
        return name
    path = YARDS / f"{name}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in YARDS.glob("*.toml"))
        if not known:
            raise ConfigError(
                f"there is no yard profile {name!r}: names are looked for in {YARDS}, which "
                f"{'holds none' if YARDS.is_dir() else 'is not there'}. They come with the sources "
                f"of trainyard, so start this in a checkout or in the image of the flows; or give "
                f"the path of a .toml, such as --profile /etc/trainyard/mysite.toml"
            )
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(
            f"there is no yard profile {name!r} in {YARDS}; {hint}, or give the path of a .toml"
        )
    return str(path)


def parse_profile(document: Mapping[str, Any], name: str) -> Profile:
    """The profile in a document, with `${VARIABLE}` of this environment filled in.

    Raises ConfigError naming the table and the key that cannot be."""
    where = f"yard {name}"
    document = filled_in(document, os.environ, where)
    block = document.get("block", "process")
    if block not in BLOCK_OPTIONS:
        raise ConfigError(f"{where}: block {block!r} is none of {', '.join(BLOCK_OPTIONS)}")
    own = () if BLOCK_OPTIONS[block] is None else (block,)
    known = ("block", *PLAIN, *TABLES, "resources", "watch", "deployments", "pool", *own)
    refuse_unknown(document, known, where)
    table = {key: value for key, value in document.items() if key in (*PLAIN, *TABLES)}
    table["deployments"] = document.get("deployments", [])
    resources, resources_by_stage = _by_stage(Resources, document, "resources", where)
    watch, watch_by_stage = _by_stage(Watch, document, "watch", where)
    options, options_by_stage = _options(document, block, where)
    hints = {
        **dict.fromkeys(("store", "browse", "run_folder", "image", "python"), str),
        **{"gpu_memory_gib": float, "deployments": tuple[str, ...]},
        **dict.fromkeys(("shares_at_once", "fruitless_attempts"), int),
        **dict.fromkeys(("environment", "images"), Mapping[str, str]),
        **dict.fromkeys(("shares", "limits"), Mapping[str, int]),
        **{"mounts": tuple[Mount, ...], "automations": Automations},
        "schedules": Mapping[str, Schedule],
    }
    values = {key: convert(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    try:
        return Profile(
            name=name,
            block=block,
            resources=resources,
            resources_by_stage=resources_by_stage,
            watch=watch,
            watch_by_stage=watch_by_stage,
            options=options,
            options_by_stage=options_by_stage,
            pool=build(Pool, {"name": name, **document.get("pool", {})}, f"{where} [pool]"),
            **values,
        )
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error


def _options(document: Mapping[str, Any], block: str, where: str) -> tuple[Any, dict[str, Any]]:
    kind = BLOCK_OPTIONS[block]
    return (None, {}) if kind is None else _by_stage(kind, document, block, where)


def _by_stage(
    cls: type[C], document: Mapping[str, Any], key: str, where: str
) -> tuple[C, dict[str, C]]:
    """What holds for every stage, and for some: what the table of a stage says goes key by key
    over the common one. A table that is a key of `cls` itself is no stage's."""
    table, where = document.get(key, {}), f"{where} [{key}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    own = [field.name for field in dataclasses.fields(cast(Any, cls))]
    stages = {
        key: value for key, value in table.items() if key not in own and isinstance(value, dict)
    }
    refuse_unknown(stages, (*CONFIGS, *own), where)
    common = {key: value for key, value in table.items() if key not in stages}
    by_stage = {
        stage: build(cls, {**common, **over}, f"{where[:-1]}.{stage}]")
        for stage, over in stages.items()
    }
    return build(cls, common, where), by_stage
