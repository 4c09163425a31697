"""Derives and validates every job that builds Retro's neighbours from a recipe. No Prefect here.

[pretrain] is the training that will read the neighbours: it decides which samples there are, and in
which order. The BERT that embeds the chunks is either `encoder`, above the tables, or trained by
[bert_tokenizer], [bert_tokenize] and [bert]."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.recipes.corpus import ENCODER, CorpusJobs, corpus_jobs
from flows.recipes.masked import card_job
from flows.recipes.pretrain import num_ranks_of, plan_job
from flows.recipes.recipe import OF_ENCODER, Recipe
from flows.recipes.stage_job import StageJob, build_config
from flows.stage_configs import CONFIGS
from flows.yard.profile import TrainingResources
from trainyard.config import leaves
from trainyard.errors import ConfigError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitJobs:
    """The jobs that find the neighbours of the samples of a split."""

    embed: StageJob
    query: StageJob


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroJobs:
    """The jobs of flow build_retro, in order."""

    corpus: CorpusJobs
    bert_corpus: CorpusJobs | None
    """None with a given encoder."""
    bert: StageJob | None
    database: StageJob
    embed_sampled: StageJob
    train_index: StageJob
    embed_train: StageJob
    add: StageJob
    splits: tuple[SplitJobs, ...]

    def all(self) -> list[StageJob]:
        """Every job."""
        bert = [] if self.bert_corpus is None else self.bert_corpus.all()
        built = [self.database, self.embed_sampled, self.train_index, self.embed_train, self.add]
        return [
            *(*self.corpus.all(), *bert, *([self.bert] if self.bert else []), *built),
            *(job for split in self.splits for job in (split.embed, split.query)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroTraining:
    """The jobs of flow pretrain_retro, in order."""

    plan: StageJob
    neighbors: RetroJobs
    pretrain: StageJob
    report: StageJob

    def all(self) -> list[StageJob]:
        """Every job."""
        return [self.plan, *self.neighbors.all(), self.pretrain, self.report]


def retro_training(recipe: Recipe, resources: TrainingResources | None = None) -> RetroTraining:
    """The jobs of a recipe that trains a Retro, each with validated options. resources: of the
    training.

    Raises ConfigError for wrong options, ArtifactError for a missing corpus."""
    built = retro_jobs(recipe)
    corpus, chosen = built.corpus, {"model_type": "retro"}
    tables = {
        f"retro_{split.query.document['retro_query_split']}_neighbors": split.query.document[
            "output_dir"
        ]
        for split in built.splits
    }
    decided = {
        **chosen,
        "data_path": [corpus.tokens],
        "retro_db": built.database.document["output_dir"],
        **tables,
        **corpus.tokenizer,
    }
    ranks = None if resources is None else num_ranks_of(recipe.table("pretrain"), resources)
    places = {"retro_db": decided["retro_db"], **tables}
    return RetroTraining(
        plan=plan_job(recipe, corpus, resources or TrainingResources(), {**chosen, **places}),
        neighbors=built,
        pretrain=recipe.job("pretrain", decided, num_ranks=ranks),
        report=card_job(recipe, corpus, retro_neighbors=tables["retro_train_neighbors"]),
    )


def retro_jobs(recipe: Recipe) -> RetroJobs:
    """The jobs of a recipe, each with validated options.

    Raises ConfigError for wrong options, ArtifactError for a missing corpus."""
    corpus = corpus_jobs(recipe)
    bert_corpus, bert = _bert(recipe)
    gpt = {"data_path": [corpus.tokens], **corpus.tokenizer}
    vocabulary = _trained_vocabulary(bert_corpus)
    database = recipe.at("retro", "db")
    chosen = {
        **(vocabulary or written_vocabulary(recipe)),
        "load": recipe.encoder or recipe.checkpoint("bert"),
        **corpus.tokenizer,
    }

    def embed(kind: str, name: str, **more: Any) -> StageJob:
        place = {"output_dir": recipe.at("retro", "embeddings", name), "chunks": kind}
        return recipe.job("retro_embed", {**chosen, **place, **more}, f"embed-{name}")

    def of_database(kind: str, **more: Any) -> StageJob:
        return embed(kind, kind, retro_db=database, data_path=[corpus.tokens], **more)

    check_index_training(recipe)
    index = index_of_sample(recipe)
    sampled, train = of_database("sampled", **index), of_database("train")
    empty, added = recipe.at("retro", "index_empty"), recipe.at("retro", "index")
    samples = {**_samples(recipe), "data_path": [corpus.tokens]}

    def of_split(split: str) -> SplitJobs:
        which = {**samples, "retro_query_split": split}
        embedded = embed("pretraining", f"samples-{split}", **which)
        decided = {
            **which,
            "index": added,
            "retro_db": database,
            "embeddings": embedded.document["output_dir"],
            "output_dir": recipe.at("retro", "query", split),
        }
        return SplitJobs(embed=embedded, query=recipe.job("faiss_query", decided, f"query-{split}"))

    return RetroJobs(
        corpus=corpus,
        bert_corpus=bert_corpus,
        bert=bert,
        database=recipe.job("retro_db", {**gpt, **vocabulary, "output_dir": database}),
        embed_sampled=sampled,
        train_index=recipe.job(
            "faiss_train", {"embeddings": sampled.document["output_dir"], "output_dir": empty}
        ),
        embed_train=train,
        add=recipe.job(
            "faiss_add",
            {
                "index": empty,
                "embeddings": [train.document["output_dir"]],
                "output_dir": added,
            },
        ),
        splits=tuple(of_split(split) for split in _splits(recipe, samples)),
    )


# --- the encoder ----------------------------------------------------------------------------------


def _bert(recipe: Recipe) -> tuple[CorpusJobs | None, StageJob | None]:
    """The jobs that train the encoder; none for a given one."""
    written = [table for table in OF_ENCODER if table in recipe.tables]
    if recipe.encoder:
        if written:
            raise ConfigError(
                f"{recipe.where}: encoder ({recipe.encoder}) is given, so none is trained; leave "
                f"[{written[0]}] out, or encoder"
            )
        return None, None
    if "bert" not in recipe.tables:
        raise ConfigError(
            f'{recipe.where}: chunks need a BERT that embeds them; give encoder = "FOLDER" above '
            "the tables, or train one by [bert]"
        )
    if recipe.tokens:
        raise ConfigError(
            f"{recipe.where}: [bert] is trained on the text of the corpus, and tokens "
            f'({recipe.tokens}) replace it; give encoder = "FOLDER" instead of [bert]'
        )
    corpus = corpus_jobs(recipe, ENCODER)
    decided = {"model_type": "bert", "data_path": [corpus.tokens], **corpus.tokenizer}
    return corpus, recipe.job("pretrain", decided, "bert", table="bert")


VOCABULARY = {
    "tokenizer_type": "retro_bert_tokenizer_type",
    "vocab_file": "retro_bert_vocab_file",
}
"""Options of a tokenizer, and what retro_db and retro_embed call them for the encoder."""


def _trained_vocabulary(corpus: CorpusJobs | None) -> dict[str, Any]:
    """The tokenizer of the encoder that is trained; nothing for a given one."""
    return {} if corpus is None else {n: corpus.tokenizer[key] for key, n in VOCABULARY.items()}


def written_vocabulary(recipe: Recipe) -> dict[str, Any]:
    """The tokenizer that [retro_db] names, for [retro_embed] too unless it names one."""
    written, own = recipe.table("retro_db"), recipe.table("retro_embed")
    return {n: written[n] for n in VOCABULARY.values() if n in written and n not in own}


# --- the index ------------------------------------------------------------------------------------


def check_index_training(recipe: Recipe) -> None:
    """Refuse an index that the sampled chunks cannot train, before any stage runs."""
    count = recipe.table("retro_db").get("retro_index_ntrain")
    places = {"embeddings": "-", "output_dir": "-"}
    where = f"{recipe.where} [faiss_train]"
    config = build_config("faiss_train", {**recipe.table("faiss_train"), **places}, where)
    if isinstance(count, int):
        config.check_sample(count, f"{recipe.where} [retro_db] retro_index_ntrain = {count}")


def index_of_sample(recipe: Recipe) -> dict[str, Any]:
    """The index that [faiss_train] names, for the stage that embeds the sampled chunks."""
    named = recipe.table("faiss_train").get("retro_index_str")
    return {} if named is None else {"retro_index_str": named}


# --- samples --------------------------------------------------------------------------------------


def _samples(recipe: Recipe) -> dict[str, Any]:
    """The options of [pretrain] that decide which samples the training takes."""
    keys = {name for name, _, _ in leaves(typing.get_type_hints(CONFIGS["faiss_query"])["samples"])}
    return {key: value for key, value in recipe.table("pretrain").items() if key in keys}


def _splits(recipe: Recipe, samples: Mapping[str, Any]) -> list[str]:
    """The splits that the training reads."""
    places = dict.fromkeys(("index", "embeddings", "retro_db", "output_dir"), "-")
    config = build_config("faiss_query", {**samples, **places}, f"{recipe.where} [pretrain]")
    measured = config.samples.eval_iters > 0

    def has_part(split: str) -> bool:
        begin, end = config.samples.data.fractions(split)
        return bool(end > begin)

    return [split for split in SPLITS if split == "train" or (measured and has_part(split))]
