"""The command lines of the flows; no Prefect here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.job import read_job
from flows.pretrain_jobs import pretrain_jobs
from flows.program import Flow, fail, run_program
from flows.recipe import read_recipe, yard_root
from trainyard.artifacts.urls import is_local
from trainyard.errors import TrainyardError


def pretrain_gpt_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.pretrain_gpt`; returns its exit status."""
    parser = _parser("pretrain_gpt", "Raw text to a trained, evaluated and benchmarked GPT.")
    parser.add_argument("recipe", help="TOML file with a table of options for each stage")
    given = parser.parse_args(argv)
    try:
        recipe = read_recipe(given.recipe, given.yard)
        pretrain_jobs(recipe)  # what is wrong in it is said at once, without waiting for a server
    except TrainyardError as error:
        return fail(error)
    print(f"{given.recipe}: everything goes to {recipe.root}", file=sys.stderr)
    status, result = run_program(
        _load_pretrain_gpt,
        prefect_home(given.yard),
        given.verbose,
        recipe=given.recipe,
        yard=given.yard,
    )
    if status == 0:
        print(result["card"])
    return status


def run_stage_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.run_stage`; returns its exit status."""
    parser = _parser("run_stage", "One stage, as a flow run.")
    parser.add_argument("stage", help="name of the stage, a package under stages/")
    parser.add_argument("--config", required=True, help="its options: TOML, YAML or JSON")
    given = parser.parse_args(argv)
    try:
        read_job(given.stage, given.config)
    except TrainyardError as error:
        return fail(error)
    status, result = run_program(
        _load_run_stage,
        prefect_home(given.yard),
        given.verbose,
        stage=given.stage,
        config=given.config,
        yard=given.yard,
    )
    if status == 0 and result["manifest_url"]:
        print(result["manifest_url"])
    return status


def prefect_home(yard: str | None) -> Path:
    """Prefect's database of runs made without a server: under the yard, or under a local one."""
    root = yard_root(yard)
    return Path(root if is_local(root) else "yard", ".prefect")


def _parser(flow: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m flows.{flow}", description=description)
    parser.add_argument(
        "--yard", help="folder or URL for everything that is made; else variable YARD, else yard"
    )
    parser.add_argument("--verbose", action="store_true", help="show every line of every stage")
    return parser


def _load_pretrain_gpt() -> Flow:
    from flows.pretrain_gpt import pretrain_gpt

    return pretrain_gpt


def _load_run_stage() -> Flow:
    from flows.run_stage import run_stage

    return run_stage
