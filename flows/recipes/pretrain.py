"""Derives and validates every job of flow pretrain_gpt from a recipe. No Prefect here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.goodput.report import goodput_url
from flows.recipes.corpus import corpus_jobs
from flows.recipes.recipe import Recipe
from flows.recipes.release import release_jobs
from flows.recipes.stage_job import StageJob, build_config, stage_job
from flows.stage_configs import CONFIGS
from flows.yard.profile import TrainingResources
from trainyard.config import leaves
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainJobs:
    """The jobs of flow pretrain_gpt, in order."""

    plan: StageJob
    collect: StageJob | None
    train_tokenizer: StageJob | None
    tokenize: tuple[StageJob, ...]
    merge: StageJob | None
    pretrain: StageJob
    export: StageJob
    reshard: StageJob
    evaluate: StageJob
    benchmark: StageJob
    report: StageJob

    def all(self) -> list[StageJob]:
        """Every job."""
        jobs: list[StageJob] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            jobs += value if isinstance(value, tuple) else [value] if value else []
        return jobs


def pretrain_jobs(recipe: Recipe, resources: TrainingResources | None = None) -> PretrainJobs:
    """The jobs of a recipe, each with validated options. resources: of its training.

    Raises ConfigError for wrong options, ArtifactError for a missing corpus."""
    corpus = corpus_jobs(recipe)
    checkpoint = recipe.at("checkpoint")
    after = release_jobs(recipe)
    trained_on = {"data_path": [corpus.tokens], "save": checkpoint, **corpus.tokenizer}
    return PretrainJobs(
        collect=corpus.collect,
        train_tokenizer=corpus.train_tokenizer,
        tokenize=corpus.tokenize,
        merge=corpus.merge,
        pretrain=recipe.job("pretrain", trained_on),
        plan=_plan(recipe, corpus.tokenizer, resources),
        export=after.export,
        reshard=after.reshard,
        evaluate=after.evaluate,
        benchmark=after.benchmark,
        report=_report(recipe, checkpoint, corpus.tokens),
    )


def _plan(
    recipe: Recipe, tokenizer: dict[str, Any], resources: TrainingResources | None
) -> StageJob:
    """The plan of the model and batch of [pretrain], on the yard's resources."""
    where = f"{recipe.where} [plan]"
    vocab_size = recipe.table("plan").get("vocab_size", tokenizer.get("vocab_size"))
    if vocab_size is None and "tokenizer_type" not in recipe.table("tokenize"):
        corpus = {"input": ["-"], "output_dir": "-"}
        written = {**corpus, **recipe.table("train_tokenizer")}
        vocab_size = build_config(
            "train_tokenizer", written, f"{recipe.where} [train_tokenizer]"
        ).vocab_size
    if vocab_size is None:
        raise ConfigError(f"{where}: vocab_size is needed, the number of the tokenizer's tokens")
    planned = to_be_planned(recipe.table("pretrain"), resources or TrainingResources())
    document = {**planned, **recipe.table("plan"), "vocab_size": vocab_size}
    return stage_job("plan", {**document, "output_dir": recipe.at("plan")}, where)


def to_be_planned(pretrain: Mapping[str, Any], resources: TrainingResources) -> dict[str, Any]:
    """Options of the plan of a training: those that the two stages share, and its resources."""
    keys = {name for name, _, _ in leaves(CONFIGS["plan"])}
    own = {key: value for key, value in pretrain.items() if key in keys}
    ranks = pretrain.get("nproc_per_node", 1)  # those that it starts itself
    given = {"world_size": ranks} if isinstance(ranks, int) and ranks > 1 else {}
    return {**own, **given, **resources.to_plan()}


def _report(recipe: Recipe, checkpoint: str, tokens: str) -> StageJob:
    trained = "tokenizer_type" not in recipe.table("tokenize")
    decided = {
        "checkpoint": checkpoint,
        "corpus": None if recipe.corpus or recipe.tokens else recipe.at("corpus"),
        "tokenizer": recipe.at("tokenizer") if trained else None,
        "tokens": tokens,
        "plan": recipe.at("plan"),
        "export": recipe.at("export"),
        "evaluation": recipe.at("evaluation"),
        "benchmark": recipe.at("benchmark"),
        "goodput": goodput_url(recipe.root, "pretrain"),
        "output_prefix": recipe.at("card"),
    }
    return recipe.job("report", decided)
