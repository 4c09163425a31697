"""Derives and validates every job of a flow that trains a BERT or a T5. No Prefect here."""

from __future__ import annotations

from dataclasses import dataclass

from flows.goodput.report import goodput_url
from flows.recipes.corpus import SENTENCES, CorpusJobs, corpus_jobs
from flows.recipes.corpus_versions import datasheets
from flows.recipes.pretrain import num_ranks_of, plan_job
from flows.recipes.recipe import Recipe
from flows.recipes.stage_job import StageJob
from flows.yard.profile import TrainingResources


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedJobs:
    """The jobs of flows pretrain_bert and pretrain_t5, in order."""

    plan: StageJob
    corpus: CorpusJobs
    pretrain: StageJob
    report: StageJob

    def all(self) -> list[StageJob]:
        """Every job."""
        return [self.plan, *self.corpus.all(), self.pretrain, self.report]


def masked_jobs(
    recipe: Recipe, family: str, resources: TrainingResources | None = None
) -> MaskedJobs:
    """The jobs of a recipe, each with validated options. family: --model-type. resources: of the
    training.

    Raises ConfigError for wrong options, ArtifactError for a missing corpus."""
    corpus = corpus_jobs(recipe, SENTENCES)
    chosen = {"model_type": family}
    ranks = None if resources is None else num_ranks_of(recipe.table("pretrain"), resources)
    data = {"data_path": [corpus.tokens], **corpus.tokenizer}
    return MaskedJobs(
        plan=plan_job(recipe, corpus, resources or TrainingResources(), chosen),
        corpus=corpus,
        pretrain=recipe.job("pretrain", {**chosen, **data}, num_ranks=ranks),
        report=card_job(recipe, corpus),
    )


def card_job(recipe: Recipe, corpus: CorpusJobs, **more: str) -> StageJob:
    """The run card of a training that is neither exported nor evaluated. more: other artifacts."""
    decided = {
        "checkpoint": recipe.checkpoint(),
        "corpus": None if corpus.collect is None else recipe.at("corpus"),
        "tokenizer": None if corpus.train_tokenizer is None else recipe.at("tokenizer"),
        "tokens": corpus.tokens,
        "plan": recipe.at("plan"),
        "goodput": goodput_url(recipe.root, "pretrain"),
        "output_prefix": recipe.at("card"),
        **datasheets(recipe.corpus),
        **more,
    }
    return recipe.job("report", decided)
