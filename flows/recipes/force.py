"""The stages that a flow run forces, as a person names them. No Prefect here."""

from __future__ import annotations

from collections.abc import Sequence

from flows.recipes.stage_job import StageJob
from trainyard.config import suggest
from trainyard.errors import ConfigError

ALL = "all"


def check_force(force: str | None, jobs: Sequence[StageJob]) -> frozenset[str]:
    """The names in a text: of stages, of single jobs of the flow such as `export`, or `all`.

    Raises ConfigError for a name that the flow does not run."""
    names = (force or "").replace(",", " ").split()
    stages = [ALL, *dict.fromkeys(job.stage for job in jobs)]
    known = {*stages, *(job.name for job in jobs)}
    for name in names:
        if name not in known:
            hint = suggest(name, stages, "stages:", sorted(known))
            raise ConfigError(f"force: this flow runs no stage {name!r}; {hint}")
    return frozenset(names)
