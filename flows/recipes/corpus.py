"""Derives and validates the jobs that make the tokens of a recipe. No Prefect here."""

from __future__ import annotations

import re
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flows.recipes.corpus_versions import expand
from flows.recipes.recipe import Recipe
from flows.recipes.stage_job import SHARES, StageJob, build_config
from flows.stage_configs import CONFIGS
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.urls import basename, join
from trainyard.config import leaves
from trainyard.errors import ArtifactError, ConfigError

TOKENIZER_KEYS = tuple(
    name for name, _, _ in leaves(typing.get_type_hints(CONFIGS["tokenize"])["tokenizer"])
)
"""Options of [tokenize] that choose the tokenizer, which [pretrain] uses too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusTables:
    """Which tables of a recipe describe the tokens of a model, and where the tokens go."""

    train_tokenizer: str = "train_tokenizer"
    tokenize: str = "tokenize"
    folder: str = ""
    """Below the root, for tokenizer and tokens; empty: the root."""
    of_sentences: bool = False
    """For a BERT or T5: word pieces, and a sequence for each sentence."""


DOCUMENTS = CorpusTables()
SENTENCES = CorpusTables(of_sentences=True)
ENCODER = CorpusTables(
    train_tokenizer="bert_tokenizer", tokenize="bert_tokenize", folder="bert", of_sentences=True
)
"""Of the BERT that embeds Retro's chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusJobs:
    """The jobs from documents to one pair of token files, in order."""

    collect: StageJob | None
    train_tokenizer: StageJob | None
    tokenize: tuple[StageJob, ...]
    merge: StageJob | None
    tokens: str
    """Prefix of the pair."""
    heldout: str
    """Held-out text for the evaluation."""
    tokenizer: dict[str, Any]
    """Options that name the tokenizer, for all stages that take one."""

    def all(self) -> list[StageJob]:
        """Every job."""
        first = [job for job in (self.collect, self.train_tokenizer) if job is not None]
        return [*first, *self.tokenize, *([self.merge] if self.merge is not None else [])]


def corpus_jobs(recipe: Recipe, tables: CorpusTables = DOCUMENTS) -> CorpusJobs:
    """The jobs of a recipe that make its tokens, each with validated options.

    Raises ConfigError for wrong options, ArtifactError for a missing corpus."""
    if recipe.tokens and not tables.folder:
        return _no_jobs(recipe, tables)
    heldout = "" if tables.of_sentences else heldout_of(recipe)
    corpus = corpus_files(recipe)
    tokenizer = tokenizer_of(recipe, tables)
    name = "corpus_text_sentence" if tables.of_sentences else "corpus_text_document"
    tokens = recipe.at(*_folder(tables), "tokens", name)
    parts = recipe.at(*_folder(tables), "tokens", "parts")
    return CorpusJobs(
        collect=None if tables.folder else _collect(recipe),
        train_tokenizer=_train_tokenizer(recipe, corpus, tables),
        tokenize=_tokenize(recipe, corpus, tokenizer, tables),
        merge=recipe.job(
            "merge",
            {"input": [parts], "output_prefix": tokens},
            f"{tables.folder}-merge" if tables.folder else "",
        ),
        tokens=tokens,
        heldout=heldout,
        tokenizer=tokenizer,
    )


def _folder(tables: CorpusTables) -> tuple[str, ...]:
    return (tables.folder,) if tables.folder else ()


def _no_jobs(recipe: Recipe, tables: CorpusTables) -> CorpusJobs:
    """The jobs for existing tokens: none."""
    where = recipe.where
    if recipe.corpus or recipe.tables.keys() & {"collect", "train_tokenizer", "merge"}:
        raise ConfigError(
            f"{where}: tokens ({recipe.tokens}) replace a corpus; leave out corpus, [collect], "
            f"[train_tokenizer] and [merge]"
        )
    if "tokenizer_type" not in recipe.table("tokenize"):
        raise ConfigError(
            f"{where}: [tokenize] must name the tokenizer that the tokens were made with"
        )
    template = {"input": ["-"], "output_prefix": "-", **recipe.table("tokenize")}
    build_config("tokenize", template, f"{where} [tokenize]")
    return CorpusJobs(
        collect=None,
        train_tokenizer=None,
        tokenize=(),
        merge=None,
        tokens=_prefix_of(recipe.tokens),
        heldout="" if tables.of_sentences else heldout_of(recipe),
        tokenizer=tokenizer_of(recipe, tables),
    )


def _prefix_of(tokens: str) -> str:
    """The prefix of the tokens: itself, or that of the version that a pointer names now."""
    if not tokens.endswith(".json"):
        return tokens
    try:
        by_key = dict(store.read_json(tokens)["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{tokens}: not a version that corpus-refresh published ({error!r})"
        ) from error
    if not by_key:
        raise ConfigError(f"{tokens} points to documents, not to tokens; write it as corpus")
    if "text" not in by_key and len(by_key) != 1:
        raise ConfigError(f"{tokens} has tokens of {', '.join(by_key)}; name the prefix of one")
    return str(by_key.get("text") or next(iter(by_key.values())))


def corpus_files(recipe: Recipe) -> list[str]:
    """The files of the corpus: named in the recipe, else those to collect."""
    if not recipe.corpus:
        config = _collect_config(recipe)
        names = [f"train-{number:05d}.jsonl" for number in range(config.num_shards)]
        return [recipe.at("corpus", name) for name in names]
    _refuse_collect(recipe)
    return expand(recipe.corpus)


def _refuse_collect(recipe: Recipe) -> None:
    if recipe.corpus and "collect" in recipe.tables:
        raise ConfigError(f"{recipe.where}: a recipe with a corpus of its own has no [collect]")


def heldout_of(recipe: Recipe) -> str:
    """The text to evaluate on: named in the recipe, else collected with the corpus."""
    _refuse_collect(recipe)
    if (recipe.corpus or recipe.tokens) and not recipe.evaluation_data:
        raise ConfigError(
            f"{recipe.where}: a corpus of your own needs a text to evaluate on; "
            f'add evaluation_data = "FILE" above the tables'
        )
    return recipe.evaluation_data or recipe.at("corpus", "heldout.txt")


def _collect_config(recipe: Recipe) -> Any:
    decided = {**recipe.table("collect"), "output_dir": recipe.at("corpus")}
    return build_config("collect", decided, f"{recipe.where} [collect]")


def _collect(recipe: Recipe) -> StageJob | None:
    return None if recipe.corpus else recipe.job("collect", {"output_dir": recipe.at("corpus")})


def tokenizer_of(recipe: Recipe, tables: CorpusTables = DOCUMENTS) -> dict[str, Any]:
    """The tokenizer's options: as written in [tokenize], else those of the trained tokenizer."""
    written = recipe.table(tables.tokenize)
    if "tokenizer_type" in written:
        return {key: written[key] for key in TOKENIZER_KEYS if key in written}
    trained = recipe.at(*_folder(tables), "tokenizer")
    if not tables.of_sentences:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": trained}
    is_cased = recipe.table(tables.train_tokenizer).get("lower_case") is False
    return {
        **{key: written[key] for key in TOKENIZER_KEYS if key in written},
        "tokenizer_type": "BertWordPieceCase" if is_cased else "BertWordPieceLowerCase",
        "vocab_file": join(trained, "vocab.txt"),
    }


def _train_tokenizer(recipe: Recipe, corpus: list[str], tables: CorpusTables) -> StageJob | None:
    if "tokenizer_type" not in recipe.table(tables.tokenize):
        decided = {"input": corpus, "output_dir": recipe.at(*_folder(tables), "tokenizer")}
        if tables.of_sentences:
            decided["algorithm"] = "wordpiece"
        label = tables.train_tokenizer if tables.folder else ""
        return recipe.job("train_tokenizer", decided, label, table=tables.train_tokenizer)
    if tables.train_tokenizer in recipe.tables:
        raise ConfigError(
            f"{recipe.where}: [{tables.tokenize}] names a tokenizer, so there is none to train; "
            f"leave out [{tables.train_tokenizer}] or tokenizer_type"
        )
    return None


def _tokenize(
    recipe: Recipe, corpus: list[str], tokenizer: dict[str, Any], tables: CorpusTables
) -> tuple[StageJob, ...]:
    written = recipe.table(tables.tokenize)
    ours = {key: value for key, value in tokenizer.items() if key not in written}
    if tables.of_sentences:
        ours["split_sentences"] = True
    before = f"{tables.folder}-" if tables.folder else ""
    jobs = []
    for file, part in zip(corpus, part_names(corpus), strict=True):
        place = recipe.at(*_folder(tables), "tokens", "parts", part)
        decided = {"input": [file], "output_prefix": place, **ours}
        label = f"{before}tokenize-{part.lower()}"
        jobs.append(recipe.job("tokenize", decided, label, table=tables.tokenize))
    return tuple(jobs)


def part_names(files: Sequence[str]) -> list[str]:
    """A name for each file's tokens: that of the file, with a digest if two jobs would share it.

    A name does not depend on the files before it. Otherwise one more file would retokenize all
    files after it."""
    return unique_names([_stem(file) for file in files], files)


def unique_names(names: Sequence[str], origins: Sequence[str]) -> list[str]:
    """Unique names for jobs: equal names get digits of the digest of their origin."""
    found = list(names)
    for digits in (8, 16, 64):
        called = Counter(name.lower() for name in found)
        found = [
            now
            if _is_alone(now.lower(), called)
            else f"{name}-{digest_bytes(of.encode())[:digits]}"
            for now, name, of in zip(found, names, origins, strict=True)
        ]
    return found


def _is_alone(name: str, called: Counter[str]) -> bool:
    """Whether no other job, also none that makes shares, has this name."""
    whole = name.removesuffix(SHARES)
    return called[name] == 1 and (whole == name or whole not in called)


def _stem(file: str) -> str:
    name = basename(file)
    for ending in (".gz", ".jsonl", ".json", ".txt"):
        name = name.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "part"
