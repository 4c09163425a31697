"""Which stages a flow run forces: the parameter `force` of the flows. No Prefect here."""

from __future__ import annotations

from collections.abc import Sequence

from flows.recipes.stage_job import StageJob
from trainyard.config import suggest
from trainyard.errors import ConfigError

ALL = "all"


def forced_names(force: str | None, jobs: Sequence[StageJob]) -> frozenset[str]:
    """The names that `force` lists: stages, single jobs of the flow such as `export`, or `all`.

    Raises ConfigError for a name that the flow does not run."""
    names = (force or "").replace(",", " ").split()
    stages = [ALL, *dict.fromkeys(job.stage for job in jobs)]
    known = {*stages, *(job.name for job in jobs)}
    for name in names:
        if name not in known:
            hint = suggest(name, stages, "stages:", sorted(known))
            raise ConfigError(f"force: this flow runs no stage {name!r}; {hint}")
    return frozenset(names)
