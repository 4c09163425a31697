"""Several runs of a stage in one process, one after another: what a process costs, and what a flow
does for a job, is paid once for many small inputs.

A document of --config lists them under `runs`, each a table of the options in which it differs from
those beside `runs`. The first run that fails ends the process; run again, it skips what is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.config import check_keys
from trainyard.errors import ConfigError

RUNS = "runs"
"""Key of a document that lists the runs."""


def options_of_runs(
    config_class: type, document: dict[str, Any], where: str
) -> list[dict[str, Any]]:
    """The options that a document gives to each run; of one without `runs`, itself."""
    if RUNS not in document:
        check_keys(config_class, document, where)
        return [document]
    common = {key: value for key, value in document.items() if key != RUNS}
    runs = document[RUNS]
    if hasattr(config_class, "check_ranks") or getattr(config_class, "RESOLVED_BY", None):
        raise ConfigError(f"{where}: {RUNS!r}: this stage may take several processes for one run")
    if not isinstance(runs, list) or not runs or not all(isinstance(one, dict) for one in runs):
        raise ConfigError(f"{where}: {RUNS!r} must be a list of tables, one for each run")
    given = [{**common, **one} for one in runs]
    for number, one in enumerate(given):
        check_keys(config_class, one, f"{where}, run {number}")
    return given


def check_outputs(configs: Sequence[Any], where: str) -> None:
    """Refuse two runs with one output."""
    seen: set[str] = set()
    for config in configs if len(configs) > 1 else ():
        output = config.output()
        if output is not None and output.url in seen:
            raise ConfigError(f"{where}: two runs write to {output.url}; give each an output")
        seen.add("" if output is None else output.url)
