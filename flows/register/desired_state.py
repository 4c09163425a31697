"""What a server must have for a yard: prefect.yaml and a profile in, plain data out.

prefect.yaml lists the deployments, as yard `local` has them; the profile gives them its name, pool,
schedules and limits. Pure; no Prefect here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flows.cli.run_flow import PATIENCE
from flows.register.render_check import check_rendering
from flows.yard.profile import FlowSchedule, Profile, limit_tag
from trainyard.config import check_known
from trainyard.errors import ConfigError
from trainyard.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
FILE = "prefect.yaml"

KEYS = ("name", "description", "entrypoint", "parameters", "tags", "work_pool", "concurrency_limit")
"""Keys of a deployment in prefect.yaml."""

ENTRYPOINT = re.compile(r"flows/(?P<module>\w+)\.py:(?P<function>\w+)")

HEARTBEAT_SECONDS = 30
"""Between two heartbeats of a flow run; Prefect's minimum."""
HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"

ZOMBIES, CANCELLED, RESUMED = "zombie runs", "cancelled runs", "crashed runs"
FAILED, NEW_CORPUS = "failures", "new corpus"
"""The automations that a yard may have."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Name of a yard: part of names of deployments, tags and blocks in Prefect."""
POOL_NAME = re.compile(r"[^/%&<>]*[^/%&<>\s'\"][^/%&<>]*")
"""Names of work pools that Prefect accepts."""

TRAINED = "pretrain-gpt"
"""The flow that a new corpus starts."""

SET_DIRECTORY = "prefect.deployments.steps.set_working_directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredDeployment:
    """A deployment of a flow in a yard."""

    entrypoint: str
    """`flows/FILE.py:FUNCTION`, in the folder of the sources."""
    name: str
    """The deployment's name: that of the yard."""
    pool: str
    description: str
    parameters: Mapping[str, Any]
    tags: tuple[str, ...]
    """The flow's name among them: lists show the deployment's, which is the yard's, in bold."""
    directory: str
    """Folder of the sources, from which workers load the flow."""
    concurrency_limit: int | None = None
    schedule: FlowSchedule | None = None
    """Its parameters are among those of the deployment."""
    version: str = VERSION
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def pull_steps(self) -> list[dict[str, Any]]:
        """The steps that a worker takes before it loads the flow."""
        return [{SET_DIRECTORY: {"directory": self.directory}}]


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """Everything that one registration writes."""

    profile: Profile
    document: Mapping[str, Any]
    """The profile's tables."""
    deployments: tuple[DesiredDeployment, ...]
    limits: Mapping[str, int]
    """By tag: the number of stages that may run at once."""
    tags: tuple[str, ...]
    """Tags of every run of the yard, by which automations match."""
    notify_url: str | None
    """URL to which failures are posted; None: none are."""

    def automation_name(self, what: str) -> str:
        """The name of an automation of the yard."""
        return f"trainyard {self.profile.name}: {what}"

    def automation_names(self) -> list[str]:
        """The names of all automations that the profile and the environment ask for."""
        chosen = self.profile.automations
        asked = {
            ZOMBIES: chosen.zombie_seconds,
            CANCELLED: chosen.zombie_seconds,
            RESUMED: chosen.resume_crashed,
            FAILED: self.notify_url,
            NEW_CORPUS: chosen.train_on_new_corpus,
        }
        return [self.automation_name(what) for what, is_asked in asked.items() if is_asked]


def desired_state(
    profile: Profile,
    document: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> DesiredState:
    """The desired state of a yard's server. Raises ConfigError for a wrong profile, and for one
    with which a stage could not start (flows/register/render_check.py)."""
    entries = read_deployments(file or ROOT / FILE)
    flows = {_flow_of(entry["entrypoint"]): entry for entry in entries}
    where = f"yard {profile.name}"
    check_known(profile.schedules, flows, f"{where} [schedules]")
    check_known(profile.deployments, flows, f"{where}: deployments")
    chosen = profile.deployments or tuple(flows)
    _check_names(profile)
    if profile.automations.train_on_new_corpus is not None and TRAINED not in chosen:
        raise ConfigError(
            f"{where} [automations]: train_on_new_corpus needs {TRAINED} among the deployments"
        )
    check_rendering(profile, Path(profile.pool.code or ROOT))
    tags = (f"yard:{profile.name}",)
    return DesiredState(
        profile=profile,
        document=document,
        deployments=tuple(_deployment(flows[flow], flow, profile, tags) for flow in chosen),
        limits={limit_tag(profile.name, stage): most for stage, most in profile.limits.items()},
        tags=tags,
        notify_url=_notify_url(profile, environment),
    )


def _check_names(profile: Profile) -> None:
    if not NAME.fullmatch(profile.name):
        raise ConfigError(
            f"yard {profile.name!r}: a yard has the name of its file, and Prefect allows only "
            f"letters, digits, '.', '_' and '-'; rename the file"
        )
    if not POOL_NAME.fullmatch(profile.pool.name):
        raise ConfigError(
            f"yard {profile.name} [pool]: Prefect does not accept name {profile.pool.name!r}: it "
            f"needs at least one letter, and none of / % & < >"
        )


def _notify_url(profile: Profile, environment: Mapping[str, str]) -> str | None:
    variable = profile.automations.notify_variable
    url = environment.get(variable)
    if url and not url.startswith(("http://", "https://")):  # a secret, so not quoted
        raise ConfigError(
            f"the variable {variable} is not a URL to post to: it must begin with https:// or "
            f"http://"
        )
    return url or None


def read_deployments(file: Path) -> list[dict[str, Any]]:
    """The deployments of a prefect.yaml; ConfigError for unknown keys."""
    if not file.exists():
        raise ConfigError(
            f"{file} cannot be read: it does not exist. {FILE} at the top of trainyard's sources "
            f"lists the deployments: register from a checkout, or in the image of the flows"
        )
    try:
        document = yaml.safe_load(file.read_text())
        entries = document["deployments"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {error!r}") from error
    for entry in entries:
        where = f"{file.name}: deployment {entry.get('entrypoint')}"
        check_known(entry, KEYS, where)
        if not ENTRYPOINT.fullmatch(str(entry.get("entrypoint"))):
            raise ConfigError(f"{where}: write the entrypoint as flows/FILE.py:FUNCTION")
    return list(entries)


def _flow_of(entrypoint: str) -> str:
    found = ENTRYPOINT.fullmatch(entrypoint)
    assert found is not None
    return found["function"].replace("_", "-")


def _deployment(
    entry: Mapping[str, Any], flow: str, profile: Profile, tags: tuple[str, ...]
) -> DesiredDeployment:
    schedule = profile.schedules.get(flow)
    of_schedule = {} if schedule is None else schedule.parameters
    return DesiredDeployment(
        entrypoint=entry["entrypoint"],
        name=profile.name,
        pool=profile.pool.name,
        description=str(entry.get("description", "")),
        parameters={**entry.get("parameters", {}), "profile": profile.name, **of_schedule},
        tags=tuple(dict.fromkeys((flow, *entry.get("tags", ()), *tags))),
        directory=profile.pool.code or str(ROOT),
        concurrency_limit=entry.get("concurrency_limit"),
        schedule=schedule,
        environment={HEARTBEAT: str(HEARTBEAT_SECONDS), **PATIENCE},
    )
