"""Derives and validates every job of flow finetune_gpt from a recipe. No Prefect here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flows.goodput.report import goodput_url
from flows.recipes.pretrain import num_ranks_of
from flows.recipes.recipe import FINETUNE, Recipe
from flows.recipes.stage_job import StageJob, build_config, located_errors
from flows.yard.profile import TrainingResources
from stages.pretrain.checkpoint_options import complete
from trainyard.artifacts.urls import join, parent
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneJobs:
    """The jobs of flow finetune_gpt, in order."""

    collect: StageJob | None
    finetune: StageJob
    evaluate: StageJob | None
    benchmark: StageJob
    report: StageJob

    def all(self) -> list[StageJob]:
        """Every job."""
        every = [self.collect, self.finetune, self.evaluate, self.benchmark, self.report]
        return [job for job in every if job is not None]


def finetune_jobs(recipe: Recipe, resources: TrainingResources | None = None) -> FinetuneJobs:
    """The jobs of a recipe, each with validated options. resources: of the training.

    Raises ConfigError for wrong options, and if there is no checkpoint to tune."""
    collect = _collect(recipe)
    checkpoint = recipe.checkpoint(FINETUNE)
    written = recipe.table(FINETUNE)
    decided: dict[str, Any] = _data(recipe, collect)
    base = {} if "load" in written else {"load": _base(recipe)}
    with located_errors(f"{recipe.where} [{FINETUNE}]"):
        completed = complete({**written, **decided, **base, "save": checkpoint})
    decided |= {key: value for key, value in completed.items() if key not in written}
    ranks = None if resources is None else num_ranks_of(written, resources)
    measured = {"load": checkpoint, "output_dir": recipe.at("benchmark"), "chat": True}
    evaluate = _evaluate(recipe, checkpoint)
    cards = {
        "checkpoint": checkpoint,
        "evaluation": None if evaluate is None else recipe.at("evaluation"),
        "benchmark": measured["output_dir"],
        "goodput": goodput_url(recipe.root, FINETUNE),
        "output_prefix": recipe.at("card"),
    }
    return FinetuneJobs(
        collect=collect,
        finetune=recipe.job("pretrain", decided, FINETUNE, ranks, table=FINETUNE),
        evaluate=evaluate,
        benchmark=recipe.job("benchmark", measured),
        report=recipe.job("report", cards),
    )


def _collect(recipe: Recipe) -> StageJob | None:
    """The stage that makes instruction data, where the recipe names none of its own."""
    if "collect" not in recipe.tables:
        return None
    return recipe.job("collect", {"conversations": True, "output_dir": recipe.at("instructions")})


def _evaluate(recipe: Recipe, checkpoint: str) -> StageJob | None:
    """Questions to answer, or a text to measure, where the recipe has some."""
    if ("evaluate" in recipe.tables) != bool(recipe.evaluation_data):
        raise ConfigError(
            f"{recipe.where}: [evaluate] and evaluation_data go together, as in "
            "'task = \"nq\"' and 'evaluation_data = \"nq/test.json\"'; give both, or neither"
        )
    if not recipe.evaluation_data:
        return None
    place = {"load": checkpoint, "output_dir": recipe.at("evaluation")}
    return recipe.job("evaluate", {**place, "valid_data": [recipe.evaluation_data]})


def _data(recipe: Recipe, collect: StageJob | None) -> dict[str, Any]:
    """The instruction data that stage collect makes; nothing where [finetune] names it."""
    names = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    named = [name for name in names if name in recipe.table(FINETUNE)]
    if bool(named) == (collect is not None):
        what = f"[{FINETUNE}] {named[0]} and [collect] both name" if named else "nothing names"
        raise ConfigError(
            f"{recipe.where}: {what} the instruction data; give data_path under [{FINETUNE}], or "
            "[collect], which asks about the functions of this Python"
        )
    if collect is None:
        return {}
    folder = recipe.at("instructions")
    shards = build_config("collect", collect.document, recipe.where).num_shards
    files = [join(folder, f"train-{number:05d}.jsonl") for number in range(shards)]
    weighted = files if shards == 1 else [word for file in files for word in ("1", file)]
    return {"train_data_path": weighted, "valid_data_path": [join(folder, "heldout.jsonl")]}


def _base(recipe: Recipe) -> str:
    """The checkpoint to tune: that of another recipe's training in the same yard."""
    if not recipe.base:
        raise ConfigError(
            f'{recipe.where}: which model is to be tuned? Give base = "quickstart", the name of a '
            f'recipe that was trained in this yard, or under [{FINETUNE}] load = "CHECKPOINT"'
        )
    return join(parent(recipe.root), recipe.base, "checkpoint")
