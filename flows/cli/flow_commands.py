"""The command lines of the flows; no Prefect here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from flows.cli.options import add_yard_of_flow, read_profile_of_flow
from flows.cli.run_flow import fail, run_program
from flows.recipes.collection import plan_collection
from flows.recipes.corpus import corpus_jobs
from flows.recipes.detoxify import detoxify_jobs
from flows.recipes.finetune import finetune_jobs
from flows.recipes.force import forced_names
from flows.recipes.inputs import check_inputs, check_packages
from flows.recipes.masked import masked_jobs
from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import Recipe, read_recipe, yard_root
from flows.recipes.refresh import check_refresh
from flows.recipes.release import check_checkpoint, release_jobs
from flows.recipes.retro import retro_jobs, retro_training
from flows.recipes.stage_job import read_job
from flows.runner.memory_check import plan_before
from flows.runner.run_lock import LOCK_FILE
from flows.server.home import home_under
from flows.yard.links import link_to
from flows.yard.profile import Profile
from trainyard.arguments import Parser
from trainyard.artifacts import store
from trainyard.artifacts.urls import lies_in
from trainyard.charts.numbers import is_number
from trainyard.errors import TrainyardError
from trainyard.logging import printable

Arguments = argparse.Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFlow:
    """The command line of a flow that runs a recipe."""

    description: str
    check: Callable[[Recipe, Profile, Arguments], object]
    """Raises an error for a wrong recipe or a missing file, before any server starts."""
    prints: str
    """The key of the flow's result to print."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options with their help; they are parameters of the flow as well."""


FORCE = "stages that run even if nothing changed: names with commas between them, or all"


def _check_corpus(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = corpus_jobs(recipe).all()
    check_inputs(recipe, jobs, profile.backend)
    forced_names(given.force, jobs)


def _check_collection(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = plan_collection(recipe).jobs
    if profile.backend == "process":
        check_packages(recipe, jobs)
    forced_names(given.force, jobs)


def _check_pretrain(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = pretrain_jobs(recipe, profile.training_resources())
    check_inputs(recipe, jobs.all(), profile.backend)
    forced_names(given.force, jobs.all())


def _check_masked(family: str) -> Callable[[Recipe, Profile, Arguments], None]:
    def check(recipe: Recipe, profile: Profile, given: Arguments) -> None:
        jobs = masked_jobs(recipe, family, profile.training_resources()).all()
        check_inputs(recipe, jobs, profile.backend)
        forced_names(given.force, jobs)

    return check


def _check_retro(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = retro_jobs(recipe).all()
    check_inputs(recipe, jobs, profile.backend)
    forced_names(given.force, jobs)


def _check_retro_training(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = retro_training(recipe, profile.training_resources()).all()
    check_inputs(recipe, jobs, profile.backend)
    forced_names(given.force, jobs)


def _check_finetune(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = finetune_jobs(recipe, profile.training_resources()).all()
    check_inputs(recipe, jobs, profile.backend)
    forced_names(given.force, jobs)


def _check_detoxify(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = detoxify_jobs(recipe, profile.training_resources()).all()
    check_inputs(recipe, jobs, profile.backend)
    forced_names(given.force, jobs)


def _check_release(recipe: Recipe, profile: Profile, given: Arguments) -> None:
    jobs = release_jobs(recipe, given.checkpoint)
    forced_names(given.force, jobs.all())
    # A running flow of this recipe may still write the checkpoint, so the flow itself checks.
    if given.checkpoint or not store.exists(recipe.at(LOCK_FILE)):
        check_checkpoint(recipe, given.checkpoint, profile.backend)
    check_inputs(recipe, [jobs.evaluate], profile.backend)


RECIPE_FLOWS = {
    "collect_corpus": RecipeFlow(
        description="Turn dumps, crawls or lists into a clean corpus, and publish a new version.",
        check=_check_collection,
        prints="card",
        options={"force": FORCE},
    ),
    "prepare_corpus": RecipeFlow(
        description="Turn raw text into one pair of token files.",
        check=_check_corpus,
        prints="tokens",
        options={"force": FORCE},
    ),
    "pretrain_gpt": RecipeFlow(
        description="Turn raw text into a trained, evaluated and benchmarked GPT.",
        check=_check_pretrain,
        prints="card",
        options={"force": FORCE},
    ),
    "pretrain_bert": RecipeFlow(
        description="Turn raw text into a trained BERT.",
        check=_check_masked("bert"),
        prints="card",
        options={"force": FORCE},
    ),
    "pretrain_t5": RecipeFlow(
        description="Turn raw text into a trained T5.",
        check=_check_masked("t5"),
        prints="card",
        options={"force": FORCE},
    ),
    "build_retro": RecipeFlow(
        description="Turn raw text into Retro's chunk database, index and tables of neighbours.",
        check=_check_retro,
        prints="retro",
        options={"force": FORCE},
    ),
    "pretrain_retro": RecipeFlow(
        description="Turn raw text into a trained Retro, its chunk database and neighbours.",
        check=_check_retro_training,
        prints="card",
        options={"force": FORCE},
    ),
    "finetune_gpt": RecipeFlow(
        description="Tune a trained GPT on instruction data.",
        check=_check_finetune,
        prints="card",
        options={"force": FORCE},
    ),
    "detoxify_gpt": RecipeFlow(
        description="Train a GPT on the least toxic of its own texts, and measure both.",
        check=_check_detoxify,
        prints="card",
        options={"force": FORCE},
    ),
    "corpus_refresh": RecipeFlow(
        description="Tokenize new sources of a corpus and publish a new version.",
        check=lambda recipe, profile, given: check_refresh(recipe),
        prints="pointer",
    ),
    "release": RecipeFlow(
        description="Reshard, export, evaluate and benchmark a checkpoint.",
        check=_check_release,
        prints="export",
        options={
            "checkpoint": "run or step folder; default: the one of the recipe",
            "force": FORCE,
        },
    ),
}
"""By the module of the flow, which has a function of the same name."""

RUN_STAGE = "run_stage"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows FLOW ...`; returns the exit status of the flow."""
    modules = {module.replace("_", "-"): module for module in (*RECIPE_FLOWS, RUN_STAGE)}
    parser = Parser(prog="python -m flows", description="Run a flow.")
    parser.add_argument("flow", choices=modules, help="the flow to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments of the flow; FLOW --help lists them"
    )
    given = parser.parse_args(argv)
    return flow_main(modules[given.flow], given.arguments)


def flow_main(module: str, argv: Sequence[str] | None = None) -> int:
    """`python -m flows.MODULE ...`; returns the exit status of the flow."""
    return _run_stage(argv) if module == RUN_STAGE else _run_recipe(module, argv)


def _run_recipe(module: str, argv: Sequence[str] | None) -> int:
    command = RECIPE_FLOWS[module]
    parser = _parser(module, command.description)
    for name, text in command.options.items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument("recipe", help="TOML file with a table of options for each stage")
    given = parser.parse_args(argv)
    try:
        profile = read_profile_of_flow(given)
        recipe = read_recipe(given.recipe, profile.yard_root(given.yard))
        command.check(recipe, profile, given)
    except TrainyardError as error:
        return fail(error)
    print(printable(f"{given.recipe}: {_places(recipe.root, profile)}"), file=sys.stderr)
    options = {name: getattr(given, name) for name in command.options}
    status, result = _run(module, profile, given, recipe=given.recipe, **options)
    if status == 0:
        is_page = command.prints == "card"
        if is_page and (trained := _losses(result["stages"])):
            print(trained, file=sys.stderr)
        print(link_to(result["card"]) if is_page else result[command.prints])
    return status


def _places(root: str, profile: Profile) -> str:
    """Where the outputs and the run folders of a recipe are."""
    runs = profile.stage_environment(root).run_folder
    text = f"everything goes to {root}"
    return text if lies_in(runs, root) else f"{text}, options and logs of its stages to {runs}"


def _losses(stages: Sequence[Mapping[str, Any]]) -> str:
    """The validation loss of the last training from its first to its last measurement; empty if
    there is none."""
    names = ("validation_loss_first", "validation_loss")
    trained = [one["metrics"] for one in stages if one["stage"] == "pretrain"]
    found = [metrics.get(name) for metrics in trained[-1:] for name in names]
    if not found or not all(map(is_number, found)):
        return ""
    return f"validation loss: from {found[0]:.2f} to {found[1]:.2f} nats per token"


def _run_stage(argv: Sequence[str] | None) -> int:
    parser = _parser(RUN_STAGE, "Run one stage as a flow.")
    parser.add_argument("stage", help="name of the stage, such as tokenize")
    parser.add_argument("--config", required=True, help="options of the stage: TOML, YAML or JSON")
    parser.add_argument("--force", action="store_true", help="run even if nothing changed")
    given = parser.parse_args(argv)
    try:
        profile = read_profile_of_flow(given)
        job = read_job(given.stage, given.config)
        plan_before(job, profile.training_resources(), given.config)
    except TrainyardError as error:
        return fail(error)
    options = {"stage": given.stage, "config": given.config, "force": given.force}
    status, result = _run(RUN_STAGE, profile, given, **options)
    if status == 0 and result["manifest_url"]:
        print(result["manifest_url"])
    return status


def _run(module: str, profile: Profile, given: Arguments, **parameters: Any) -> tuple[int, Any]:
    """Run a flow; its exit status, and its result if that is 0."""
    return run_program(
        lambda: getattr(import_module(f"flows.{module}"), module),
        home_under(yard_root(profile.yard_root(given.yard))),
        given.verbose,
        yard=given.yard,
        profile=given.profile,
        **parameters,
    )


def _parser(module: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m flows.{module}", description=description)
    parser.elsewhere = ": options of stages stand in the recipe, in a table for each stage"
    add_yard_of_flow(parser)
    parser.add_argument("--verbose", action="store_true", help="show every line of every stage")
    return parser
