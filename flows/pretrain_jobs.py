"""A recipe in, every job of flow pretrain_gpt out, validated before any work. No Prefect here."""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from typing import Any

from flows.job import CONFIGS, StageJob, build_config, stage_job
from flows.recipe import Recipe
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.urls import basename
from trainyard.config import leaves
from trainyard.errors import ConfigError

TOKENIZER_KEYS = tuple(
    name for name, _, _ in leaves(typing.get_type_hints(CONFIGS["tokenize"])["tokenizer"])
)
"""What [tokenize] says of its tokenizer holds for [pretrain] as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainJobs:
    """Everything that flow pretrain_gpt runs, in the order in which it does."""

    plan: StageJob
    collect: StageJob | None
    train_tokenizer: StageJob | None
    tokenize: tuple[StageJob, ...]
    merge: StageJob
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


def pretrain_jobs(recipe: Recipe) -> PretrainJobs:
    """The jobs of a recipe, each with validated options.

    Raises ConfigError for what was written, ArtifactError for a corpus that is not there."""
    corpus, heldout = _corpus(recipe)
    tokenizer = _tokenizer(recipe)
    tokens = recipe.at("tokens", "corpus_text_document")
    checkpoint, resharded = recipe.at("checkpoint"), recipe.at("resharded")
    reads = {"load": resharded}  # what was trained, after it was written in another layout
    return PretrainJobs(
        collect=_collect(recipe),
        train_tokenizer=_train_tokenizer(recipe, corpus),
        tokenize=_tokenize(recipe, corpus, tokenizer),
        merge=recipe.job(
            "merge", {"input": [recipe.at("tokens", "parts")], "output_prefix": tokens}
        ),
        pretrain=recipe.job("pretrain", {"data_path": [tokens], "save": checkpoint, **tokenizer}),
        plan=_plan(recipe, tokenizer),
        export=_export(recipe, checkpoint),
        reshard=recipe.job("reshard", {"load_dir": checkpoint, "save_dir": resharded}),
        evaluate=recipe.job(
            "evaluate", {**reads, "valid_data": heldout, "output_dir": recipe.at("evaluation")}
        ),
        benchmark=recipe.job("benchmark", {**reads, "output_dir": recipe.at("benchmark")}),
        report=_report(recipe, checkpoint, tokens),
    )


def _corpus(recipe: Recipe) -> tuple[list[str], str]:
    """The files of the corpus, and the text to evaluate on."""
    if not recipe.corpus:
        decided = {**recipe.table("collect"), "output_dir": recipe.at("corpus")}
        config = build_config("collect", decided, f"{recipe.where} [collect]")
        names = [f"train-{number:05d}.jsonl" for number in range(config.num_shards)]
        files = [recipe.at("corpus", name) for name in names]
        return files, recipe.evaluation_data or recipe.at("corpus", "heldout.txt")
    if "collect" in recipe.tables:
        raise ConfigError(f"{recipe.where}: with a corpus of its own the recipe has no [collect]")
    if not recipe.evaluation_data:
        raise ConfigError(
            f"{recipe.where}: a corpus of one's own needs a text to evaluate on; "
            f'add evaluation_data = "FILE" above the tables'
        )
    files = [file for pattern in recipe.corpus for file in store.expand(pattern)]
    return list(dict.fromkeys(files)), recipe.evaluation_data


def _collect(recipe: Recipe) -> StageJob | None:
    return None if recipe.corpus else recipe.job("collect", {"output_dir": recipe.at("corpus")})


def _tokenizer(recipe: Recipe) -> dict[str, Any]:
    """The tokenizer's options: as written under [tokenize], else of the one that is trained."""
    written = recipe.table("tokenize")
    if "tokenizer_type" in written:
        return {key: written[key] for key in TOKENIZER_KEYS if key in written}
    return {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": recipe.at("tokenizer"),
    }


def _train_tokenizer(recipe: Recipe, corpus: list[str]) -> StageJob | None:
    if "tokenizer_type" not in recipe.table("tokenize"):
        decided = {"input": corpus, "output_dir": recipe.at("tokenizer")}
        return recipe.job("train_tokenizer", decided)
    if "train_tokenizer" in recipe.tables:
        raise ConfigError(
            f"{recipe.where}: [tokenize] names a tokenizer, so there is none to train; "
            f"leave out [train_tokenizer] or tokenizer_type"
        )
    return None


def _tokenize(recipe: Recipe, corpus: list[str], tokenizer: dict[str, Any]) -> tuple[StageJob, ...]:
    written = recipe.table("tokenize")
    ours = {key: value for key, value in tokenizer.items() if key not in written}
    jobs = []
    for file, part in zip(corpus, part_names(corpus), strict=True):
        place = recipe.at("tokens", "parts", part)
        decided = {"input": [file], "output_prefix": place, **ours}
        jobs.append(recipe.job("tokenize", decided, f"tokenize-{part.lower()}"))
    return tuple(jobs)


def part_names(files: list[str]) -> list[str]:
    """A name for each file's tokens, from its own; told apart by a digest where two are alike.

    A name never depends on what other files there are in front of it, lest one more file make all
    behind it be tokenized again."""
    stems = [_stem(file) for file in files]
    return [
        stem if stems.count(stem) == 1 else f"{stem}-{digest_bytes(file.encode())[:8]}"
        for stem, file in zip(stems, files, strict=True)
    ]


def _stem(file: str) -> str:
    name = basename(file)
    for ending in (".gz", ".jsonl", ".json", ".txt"):
        name = name.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "part"


def _plan(recipe: Recipe, tokenizer: dict[str, Any]) -> StageJob:
    """The plan of the very model and batch that [pretrain] describes."""
    keys = {name for name, _, _ in leaves(CONFIGS["plan"])}
    pretrain = {key: value for key, value in recipe.table("pretrain").items() if key in keys}
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
    document = {**pretrain, **recipe.table("plan"), "vocab_size": vocab_size}
    return stage_job("plan", {**document, "output_dir": recipe.at("plan")}, where)


def _export(recipe: Recipe, checkpoint: str) -> StageJob:
    document = {"load_dir": checkpoint, "save_dir": recipe.at("export"), "saver": "hf"}
    return stage_job("reshard", document, f"{recipe.where} (export)", "export")


def _report(recipe: Recipe, checkpoint: str, tokens: str) -> StageJob:
    trained = "tokenizer_type" not in recipe.table("tokenize")
    decided = {
        "checkpoint": checkpoint,
        "corpus": None if recipe.corpus else recipe.at("corpus"),
        "tokenizer": recipe.at("tokenizer") if trained else None,
        "tokens": tokens,
        "plan": recipe.at("plan"),
        "export": recipe.at("export"),
        "evaluation": recipe.at("evaluation"),
        "benchmark": recipe.at("benchmark"),
        "output_prefix": recipe.at("card"),
    }
    return recipe.job("report", decided)
