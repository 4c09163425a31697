"""Checks that the files a recipe names exist, and packages of its stages, before the first one. No
Prefect here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flows.recipes.recipe import Recipe
from flows.recipes.stage_job import StageJob, build_config
from flows.yard.profile import CONTAINED
from flows.yard.stage_packages import how_to_install, missing, needs_of
from trainyard.artifacts import store
from trainyard.artifacts.inputs import check_exists
from trainyard.artifacts.urls import is_local, lies_in, local_path, parent
from trainyard.errors import ArtifactError, ConfigError

CORPUS = "input"
"""Input of the stages that read a corpus, whose files were listed to derive their jobs."""


def check_inputs(recipe: Recipe, jobs: Sequence[StageJob], backend: str) -> None:
    """Raise ArtifactError for a missing file that a job reads and no job writes, ConfigError for
    packages that stages of this Python miss, and InfrastructureError if the store of the recipe's
    outputs cannot be reached."""
    if backend == "process":
        check_packages(recipe, jobs)
    store.list_folder(recipe.root)
    made = [job.output.url for job in jobs if job.output is not None]
    checked = set()
    for job in jobs:
        config = build_config(job.stage, job.document, recipe.where)
        for name, urls in config.inputs().items():
            for url in () if name == CORPUS else urls:
                where = _written_in(recipe, job.stage, url)
                is_made = (not where and lies_in(url, recipe.root)) or url in made
                if not (is_made or url in checked or is_elsewhere(url, backend)):
                    _check(url, f"{recipe.where}: {where or f'[{job.stage}] {name}'}")
                checked.add(url)


def check_packages(recipe: Recipe, jobs: Sequence[StageJob]) -> None:
    """Raise ConfigError if this Python misses a package of Retro that a job needs."""
    needs = {job.stage: needs_of(job.stage, job.document) for job in jobs}
    lacking = missing(module for modules in needs.values() for module in modules)
    if lacking:
        stages = [stage for stage, modules in needs.items() if set(modules) & set(lacking)]
        raise ConfigError(
            f"{recipe.where}: {', '.join(stages)} need {' and '.join(lacking)}, which "
            f"{sys.executable} does not have; {how_to_install(lacking)}, or choose a profile "
            "whose stages have images"
        )


def is_elsewhere(url: str, backend: str) -> bool:
    """Whether a file may lie in a folder that only containers see."""
    around = local_path(parent(url)) if is_local(url) else None
    return backend in CONTAINED and around is not None and not around.exists()


def _check(url: str, where: str) -> None:
    try:
        check_exists(url)
    except ArtifactError as error:
        is_relative = is_local(url) and not Path(url).is_absolute() and "://" not in url
        start = f"; the path starts at {Path.cwd()}" if is_relative else ""
        raise ArtifactError(f"{where} {error}{start}") from error


def _written_in(recipe: Recipe, stage: str, url: str) -> str:
    """The key of the recipe that has this URL, with its table; empty if the flow chose it."""
    for key in ("evaluation_data", "tokens"):
        if getattr(recipe, key) == url:
            return key
    for table in (stage, *recipe.tables):
        for key, value in recipe.table(table).items():
            if value == url or (isinstance(value, list) and url in value):
                return f"[{table}] {key}"
    return ""
