"""Derives and validates every job of flow pretrain_gpt from a recipe. No Prefect here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flows.goodput.report import goodput_url
from flows.recipes.corpus import CorpusJobs, corpus_jobs
from flows.recipes.corpus_versions import datasheets
from flows.recipes.recipe import Recipe
from flows.recipes.release import ReleaseJobs, release_jobs
from flows.recipes.stage_job import StageJob, build_config, located_errors, stage_job
from flows.stage_configs import CONFIGS
from flows.yard.profile import TrainingResources
from trainyard.artifacts.inputs import check_exists, metrics_of
from trainyard.artifacts.output import PARTS
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
    after = release_jobs(recipe)
    trained_on = {"data_path": [corpus.tokens], **corpus.tokenizer}
    ranks = None if resources is None else num_ranks_of(recipe.table("pretrain"), resources)
    pretrain = recipe.job("pretrain", trained_on, num_ranks=ranks)
    _check_model(recipe, pretrain, after)
    return PretrainJobs(
        collect=corpus.collect,
        train_tokenizer=corpus.train_tokenizer,
        tokenize=corpus.tokenize,
        merge=corpus.merge,
        pretrain=pretrain,
        plan=plan_job(recipe, corpus, resources or TrainingResources()),
        export=after.export,
        reshard=after.reshard,
        evaluate=after.evaluate,
        benchmark=after.benchmark,
        report=_report(recipe, corpus.tokens),
    )


def _check_model(recipe: Recipe, pretrain: StageJob, after: ReleaseJobs) -> None:
    """Refuse a model that the stages after its training would refuse."""
    model = build_config("pretrain", pretrain.document, recipe.where).model
    for job in (after.evaluate, after.benchmark):
        with located_errors(where := f"{recipe.where} [{job.stage}]"):
            build_config(job.stage, job.document, where).check_model(model)
    try:
        build_config("reshard", after.export.document, recipe.where).check_model(model)
    except ConfigError as error:
        raise ConfigError(
            f"{recipe.where} [pretrain]: the flow exports what it trains to Hugging Face's format. "
            f"{error}, by the stages alone"
        ) from error


def plan_job(
    recipe: Recipe,
    corpus: CorpusJobs,
    resources: TrainingResources,
    decided: Mapping[str, Any] = MappingProxyType({}),
) -> StageJob:
    """The plan of the model and batch of [pretrain], on the yard's resources.

    decided: options of the training that its flow decides."""
    where, written = f"{recipe.where} [plan]", recipe.table("plan")
    planned = to_be_planned({**recipe.table("pretrain"), **decided}, resources)
    own = {"vocab_size": _vocab_size(recipe, corpus), "output_dir": recipe.at("plan")}
    try:
        return stage_job("plan", {**planned, **own, **written}, where)
    except ConfigError:
        # Without [plan], and whatever the vocabulary: is it [pretrain] that is wrong?
        build_config("plan", {**planned, "vocab_size": 1}, f"{recipe.where} [pretrain]")
        raise


def _metrics_of_tokens(prefix: str) -> Mapping[str, Any]:
    return metrics_of(f"{prefix}.bin") or metrics_of(prefix + PARTS)


def _vocab_size(recipe: Recipe, corpus: CorpusJobs) -> Any:
    """Tokens of the tokenizer: as written, of the one to train, or from the tokens' manifest."""
    size = recipe.table("plan").get("vocab_size", corpus.tokenizer.get("vocab_size"))
    if size is None and corpus.train_tokenizer is not None:
        document = corpus.train_tokenizer.document
        size = build_config("train_tokenizer", document, recipe.where).vocab_size
        tokenize = build_config("tokenize", corpus.tokenize[0].document, recipe.where)
        size += tokenize.tokenizer.num_extra_ids
    if size is None and recipe.tokens:
        size = _metrics_of_tokens(corpus.tokens).get("vocab_size")
    if size is None:
        if recipe.tokens:
            check_exists(corpus.tokens)
        raise ConfigError(
            f"{recipe.where} [plan]: vocab_size is needed, the number of the tokenizer's tokens"
        )
    return size


def num_ranks_of(pretrain: Mapping[str, Any], resources: TrainingResources) -> int:
    """Ranks of the training: those of the yard, or those that it starts itself."""
    own = pretrain.get("nproc_per_node", 1)
    is_own = resources.world_size == 1 and isinstance(own, int)
    return int(own) if is_own else resources.world_size


def to_be_planned(pretrain: Mapping[str, Any], resources: TrainingResources) -> dict[str, Any]:
    """Options of the plan of a training: those that the two stages share, and its resources."""
    keys = {name for name, _, _ in leaves(CONFIGS["plan"])}
    own = {key: value for key, value in pretrain.items() if key in keys}
    ranks = num_ranks_of(pretrain, resources)
    return {**own, **({"world_size": ranks} if ranks > 1 else {}), **resources.to_plan()}


def _report(recipe: Recipe, tokens: str) -> StageJob:
    trained = "tokenizer_type" not in recipe.table("tokenize")
    decided = {
        "checkpoint": recipe.checkpoint(),
        "corpus": None if recipe.corpus or recipe.tokens else recipe.at("corpus"),
        "tokenizer": recipe.at("tokenizer") if trained else None,
        "tokens": tokens,
        "plan": recipe.at("plan"),
        "export": recipe.at("export"),
        "evaluation": recipe.at("evaluation"),
        "benchmark": recipe.at("benchmark"),
        "goodput": goodput_url(recipe.root, "pretrain"),
        "output_prefix": recipe.at("card"),
        **datasheets(recipe.corpus),
    }
    return recipe.job("report", decided)
