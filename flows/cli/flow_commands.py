"""The command lines of the flows; no Prefect here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flows.cli.options import add_yard_of_flow, check_profile, check_root
from flows.cli.run_flow import Flow, fail, run_program
from flows.recipes.corpus import corpus_jobs
from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import Recipe, read_recipe, yard_root
from flows.recipes.refresh import check_refresh
from flows.recipes.release import check_checkpoint
from flows.recipes.stage_job import read_job
from flows.runner.memory_check import plan_before
from flows.runner.run_lock import TURN
from flows.server.home import home_under
from flows.yard.profile import Profile
from flows.yard.read_profile import read_profile
from trainyard.artifacts import store
from trainyard.errors import TrainyardError


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows FLOW ...`; returns the exit status of the flow."""
    names = {name.replace("_", "-"): run for name, run in FLOWS.items()}
    parser = argparse.ArgumentParser(prog="python -m flows", description="Run a flow.")
    parser.add_argument("flow", choices=names, help="which one")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own: FLOW --help")
    given = parser.parse_args(argv)
    return names[given.flow](given.arguments)


def pretrain_gpt_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.pretrain_gpt`; returns its exit status."""
    parser = _parser("pretrain_gpt", "Raw text to a trained, evaluated and benchmarked GPT.")
    return _recipe_main(
        parser,
        argv,
        # What is wrong in it is said at once, without waiting for a server.
        lambda recipe, profile, given: pretrain_jobs(recipe, profile.means()),
        _load_pretrain_gpt,
        "card",
    )


def prepare_corpus_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.prepare_corpus`; returns its exit status."""
    parser = _parser("prepare_corpus", "Raw text to one pair of token files.")
    return _recipe_main(
        parser,
        argv,
        lambda recipe, profile, given: corpus_jobs(recipe),
        _load_prepare_corpus,
        "tokens",
    )


def corpus_refresh_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.corpus_refresh`; returns its exit status."""
    parser = _parser("corpus_refresh", "Tokenize what is new in a corpus, publish a new version.")
    return _recipe_main(
        parser,
        argv,
        lambda recipe, profile, given: check_refresh(recipe),
        _load_corpus_refresh,
        "pointer",
    )


def release_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.release`; returns its exit status."""
    parser = _parser("release", "Reshard, export, evaluate and benchmark a checkpoint.")
    parser.add_argument("--checkpoint", help="run or step folder; else the one of the recipe")
    return _recipe_main(
        parser,
        argv,
        _check_release,
        _load_release,
        "export",
        "checkpoint",
    )


def _check_release(recipe: Recipe, profile: Profile, given: argparse.Namespace) -> None:
    # What a flow of this recipe is about to train is looked for when it has ended.
    if given.checkpoint or not store.exists(recipe.at(TURN)):
        check_checkpoint(recipe, given.checkpoint, profile.block)


def _recipe_main(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    check: Callable[[Recipe, Profile, argparse.Namespace], object],
    load: Callable[[], Flow],
    result: str,
    *more: str,
) -> int:
    """A flow of a recipe: check it, run it, print one thing that it returns.

    `more`: options of the command line that are parameters of the flow as well."""
    parser.add_argument("recipe", help="TOML file with a table of options for each stage")
    given = parser.parse_args(argv)
    try:
        check_root(given.yard)
        check_profile(given.profile)
        profile = read_profile(given.profile)
        recipe = read_recipe(given.recipe, profile.yard_root(given.yard))
        check(recipe, profile, given)
    except TrainyardError as error:
        return fail(error)
    print(f"{given.recipe}: everything goes to {recipe.root}", file=sys.stderr)
    status, returned = run_program(
        load,
        prefect_home(profile.yard_root(given.yard)),
        given.verbose,
        recipe=given.recipe,
        yard=given.yard,
        profile=given.profile,
        **{name: getattr(given, name) for name in more},
    )
    if status == 0:
        print(returned[result])
    return status


def run_stage_main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.run_stage`; returns its exit status."""
    parser = _parser("run_stage", "One stage, as a flow run.")
    parser.add_argument("stage", help="name of the stage, a package under stages/")
    parser.add_argument("--config", required=True, help="its options: TOML, YAML or JSON")
    given = parser.parse_args(argv)
    try:
        check_root(given.yard)
        check_profile(given.profile)
        profile = read_profile(given.profile)
        job = read_job(given.stage, given.config)
        plan_before(job, profile.means(), given.config)
    except TrainyardError as error:
        return fail(error)
    status, result = run_program(
        _load_run_stage,
        prefect_home(profile.yard_root(given.yard)),
        given.verbose,
        stage=given.stage,
        config=given.config,
        yard=given.yard,
        profile=given.profile,
    )
    if status == 0 and result["manifest_url"]:
        print(result["manifest_url"])
    return status


def prefect_home(yard: str | None) -> Path:
    """Prefect's database of runs made without a server: under the yard, or under a local one."""
    return home_under(yard_root(yard))


def _parser(flow: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m flows.{flow}", description=description)
    add_yard_of_flow(parser)
    parser.add_argument("--verbose", action="store_true", help="show every line of every stage")
    return parser


def _load_pretrain_gpt() -> Flow:
    from flows.pretrain_gpt import pretrain_gpt

    return pretrain_gpt


def _load_prepare_corpus() -> Flow:
    from flows.prepare_corpus import prepare_corpus

    return prepare_corpus


def _load_corpus_refresh() -> Flow:
    from flows.corpus_refresh import corpus_refresh

    return corpus_refresh


def _load_release() -> Flow:
    from flows.release import release

    return release


def _load_run_stage() -> Flow:
    from flows.run_stage import run_stage

    return run_stage


FLOWS: dict[str, Callable[[Sequence[str] | None], int]] = {
    "prepare_corpus": prepare_corpus_main,
    "pretrain_gpt": pretrain_gpt_main,
    "corpus_refresh": corpus_refresh_main,
    "release": release_main,
    "run_stage": run_stage_main,
}
"""The program of each flow."""
