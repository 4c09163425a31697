"""Names of flow runs, which distinguish them in Prefect's lists.

A name has the recipe, what the run overrides, and when it was due: `quickstart lr=0.002 11-23
17:05`; that of a failed run also the reason. A run that is started again gets its first name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from flows.backends.outcome import brief
from flows.recipes.overrides import AS_RECIPE, parse_text
from trainyard.artifacts.urls import basename, show_url
from trainyard.errors import ConfigError
from trainyard.logging import printable

ELSEWHERE = ("recipe", "stage", "config", "options", "yard", "profile", "overrides")
"""Parameters that a name has in another form, or not at all."""
SHOWN = 3
"""Overridden options in a name; the number of others follows."""
LONGEST = 24
"""Characters of a value."""


def of_recipe() -> str:
    """The name of a run of a recipe."""
    return recipe_name(_parameters(), _due())


def of_stage() -> str:
    """The name of a run of one stage."""
    return f"{_parameters().get('stage')} {_shown(_due())}"


def of_sweep() -> str:
    """The name of a sweep."""
    does = "remove" if _parameters().get("remove") else "report"
    return f"{_parameters().get('profile')} {does} {_shown(_due())}"


def name_and_id() -> str:
    """The present flow run, for lists outside Prefect; empty without one."""
    return " ".join(filter(None, (runtime.flow_run.name, runtime.flow_run.id)))


async def add_reason(error: Exception) -> None:
    """Put why it failed into the name of the flow run, which stands on top of its page.

    The next start of the run names it anew."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run, reason = context.flow_run, brief(printable(str(error)))
    async with get_client() as client:
        await client.update_flow_run(run.id, name=f"{run.name}: {reason}")


def recipe_name(parameters: Mapping[str, Any], due: datetime) -> str:
    """The name of a run of a recipe with these parameters."""
    stem = PurePosixPath(basename(show_url(str(parameters.get("recipe"))))).stem
    given = [f"{name}={_short(value)}" for name, value in _overridden(parameters).items()]
    others = [f"+{len(given) - SHOWN}"] if len(given) > SHOWN else []
    return " ".join([stem, *given[:SHOWN], *others, _shown(due)])


def _overridden(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Options that differ from the recipe, from the fields and the text of a form."""
    unset = (None, "", AS_RECIPE)
    fields = {k: v for k, v in parameters.items() if k not in ELSEWHERE and v not in unset}
    try:
        document = parse_text(parameters.get("overrides") or "")
    except ConfigError:  # the flow says what is wrong with it
        return {**fields, "overrides": "?"}
    for name, value in document.items():
        table = value if isinstance(value, dict) else {"": value}
        fields |= {f"{name}.{key}".rstrip("."): one for key, one in table.items()}
    return fields


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else " ".join(show_url(str(value)).split())
    return text if len(text) <= LONGEST else f"...{text[3 - LONGEST :]}"


def _parameters() -> dict[str, Any]:
    return dict(runtime.flow_run.parameters or {})


def _due() -> datetime:
    return runtime.flow_run.scheduled_start_time or datetime.now().astimezone()


def _shown(moment: datetime) -> str:
    return f"{moment.astimezone():%m-%d %H:%M}"
