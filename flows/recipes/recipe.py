"""Recipes: the options of all stages of a flow in one TOML file.

A recipe has a table for each stage; a key is a flag of that stage with underscores. Addresses of
artifacts are not in it: they follow from the yard and the recipe's name. Keys above the tables:

    corpus = ["books/*.jsonl"]       your own documents, instead of stage collect
    evaluation_data = "held.txt"     text to evaluate on; required with a corpus of your own
    tokens = "web/current.json"      existing tokens, instead of a corpus: a pair's prefix, or what
                                     corpus-refresh publishes
    encoder = "models/minilm"        for build-retro: a BERT that embeds chunks, instead of training
                                     one by [bert_tokenizer], [bert_tokenize] and [bert]
    base = "quickstart"              for finetune-gpt and detoxify-gpt: the recipe whose trained
                                     model is tuned, in the same yard; or [finetune] or [pretrain]
                                     has load = "CHECKPOINT"
    preset = "models/gpt-7b.toml"    options of pretrain, which [pretrain] overrides; a relative
                                     path starts at the recipe's folder"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.recipes.stage_job import StageJob, stage_job, unreadable
from flows.stage_configs import CONFIGS
from trainyard.artifacts.documents import read_text, suffix
from trainyard.artifacts.urls import (
    basename,
    hold_credentials,
    join,
    lies_in,
    parent,
    refuse_secrets,
    show_url,
)
from trainyard.config import convert, leaves, other_names, suggest
from trainyard.config_text import parse_document
from trainyard.errors import ConfigError, TrainyardError
from trainyard.shown_values import shown

TOP_LEVEL = ("corpus", "evaluation_data", "tokens", "encoder", "base", "preset")
ASKED = (
    *("blame", "certify", "index", "inspect", "retro_explore"),
    *("retro_export", "retro_import", "retro_preprocess", "serve", "verify"),
)
"""Stages that a person runs, which have no table in a recipe."""
OF_ENCODER = {"bert_tokenizer": "train_tokenizer", "bert_tokenize": "tokenize", "bert": "pretrain"}
"""Tables of the BERT that embeds Retro's chunks, and their stages."""
FINETUNE = "finetune"
"""Table of an instruction tuning, which stage pretrain runs."""
FETCH = "fetch"
"""Table of a crawl of URL lists, which stage collect runs."""
CONTINUATIONS = "continuations"
"""Table of the texts by which a detoxification is measured, which stage generate writes."""
TABLES = (
    *(name for name in CONFIGS if name not in ASKED),
    *(*OF_ENCODER, FINETUNE, FETCH, CONTINUATIONS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe as written, and the root of its artifacts."""

    where: str
    root: str
    corpus: tuple[str, ...] = ()
    evaluation_data: str = ""
    tokens: str = ""
    encoder: str = ""
    base: str = ""
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The recipe's name, which is also the name of the folder of its artifacts."""
        return basename(self.root)

    def table(self, stage: str) -> dict[str, Any]:
        """The table of a stage."""
        return dict(self.tables.get(stage, {}))

    def job(
        self,
        stage: str,
        decided: Mapping[str, Any],
        label: str = "",
        num_ranks: int | None = None,
        table: str = "",
    ) -> StageJob:
        """A stage with its written options and those that only the flow decides.

        num_ranks: of a training; None: unknown. table: of the options, if not that of the stage."""
        table = table or stage
        written, where = self.table(table), f"{self.where} [{table}]"
        if stage == "pretrain" and not written.get("save"):
            # In the recipe's own folder, another model or other data asks for that run.
            decided = {**decided, "save": self.checkpoint(table), "new_run": True}
            written.pop("save", None)
        for key in written.keys() & decided.keys():
            raise ConfigError(
                f"{where}: {key} is decided by the flow ({decided[key]!r}); leave it out. Where "
                f"artifacts are written is set by --root or the variable YARD"
            )
        return stage_job(stage, {**written, **decided}, where, label, num_ranks)

    def with_options(self, document: Mapping[str, Any]) -> Recipe:
        """The recipe with options that override those written: tables, and keys above them."""
        keys = {key: value for key, value in document.items() if key not in TABLES}
        tables = dict(self.tables)
        for stage, table in ((name, document[name]) for name in document if name in TABLES):
            others = other_names(CONFIGS[stage_of(stage)])
            written = self.table(stage).items()
            kept = {key: value for key, value in written if others.get(key, key) not in table}
            tables[stage] = {**kept, **table}
        return dataclasses.replace(self, **keys, tables=tables)

    def at(self, *parts: str) -> str:
        """An address under the root."""
        return join(self.root, *parts)

    def checkpoint(self, table: str = "pretrain") -> str:
        """Where the training of a table writes its checkpoints: its `save`, else below the root."""
        where = f"{self.where} [{table}] save"
        save = convert(self.table(table).get("save", ""), str, where).rstrip("/")
        if save and lies_in(self.root, save):
            raise ConfigError(
                f"{where} ({show_url(save)}) holds the other artifacts of the recipe "
                f"({show_url(self.root)}); give a folder of its own"
            )
        return save or self.at(*(["bert"] if table == "bert" else []), "checkpoint")


def stage_of(table: str) -> str:
    """The stage whose options a table of a recipe holds."""
    others = {FINETUNE: "pretrain", FETCH: "collect", CONTINUATIONS: "generate"}
    return {**OF_ENCODER, **others}.get(table, table)


def yard_root(yard: str | None = None) -> str:
    """The folder or URL of all runs: given, else variable YARD, else `yard`."""
    root = yard or os.environ.get("YARD") or "yard"
    refuse_secrets(root)
    return root.rstrip("/")


def read_recipe(path: str, yard: str | None = None) -> Recipe:
    """Read a recipe; ConfigError if it is not valid."""
    try:
        text = read_text(path)
    except TrainyardError as error:
        raise unreadable("recipe", path, error) from error
    return parse_recipe(text, path, yard)


def parse_recipe(text: str, path: str, yard: str | None = None) -> Recipe:
    """The recipe in a text; `path` gives its name."""
    name = Path(basename(path))
    if name.name.startswith("."):
        raise ConfigError(
            f"recipe {name.name}: its name, and so its folder in the yard, begins with a dot; such "
            f"folders are trainyard's own, so rename it"
        )
    document = parse_document(text, suffix(path), path)
    for key, value in document.items():
        _check_key(key, value, path)
        _refuse_passwords(value, f"{path}: {key}")
    tables = {key: value for key, value in document.items() if key in TABLES}
    if preset := convert(document.get("preset", ""), str, f"{path}: preset"):
        tables["pretrain"] = {**_preset(preset, path), **tables.get("pretrain", {})}
    recipe = Recipe(
        where=path,
        root=join(yard_root(yard), name.stem),
        corpus=convert(document.get("corpus", []), tuple[str, ...], f"{path}: corpus"),
        evaluation_data=convert(
            document.get("evaluation_data", ""), str, f"{path}: evaluation_data"
        ),
        tokens=convert(document.get("tokens", ""), str, f"{path}: tokens"),
        encoder=convert(document.get("encoder", ""), str, f"{path}: encoder"),
        base=convert(document.get("base", ""), str, f"{path}: base"),
        tables=tables,
    )
    for url in (*recipe.corpus, recipe.evaluation_data, recipe.tokens, recipe.encoder):
        refuse_secrets(url)
    return recipe


def _preset(preset: str, path: str) -> dict[str, Any]:
    """Options of pretrain in a document; a relative path starts at the recipe's folder."""
    is_whole = "://" in preset or preset.startswith("/")
    url = preset if is_whole else join(parent(path), preset)
    try:
        text = read_text(url)
    except TrainyardError as error:
        raise ConfigError(f"{path}: preset {show_url(preset)} cannot be read: {error}") from error
    document = parse_document(text, suffix(url), url)
    _refuse_passwords(document, f"{path}: preset {preset}")
    strangers = sorted(document.keys() - _keys_of("pretrain"))
    if strangers:
        raise ConfigError(
            f"{path}: preset {preset} has {strangers[0]!r}, which is not an option of pretrain; a "
            f"preset holds options of pretrain, without a table above them"
        )
    return document


def _keys_of(stage: str) -> set[str]:
    return {name for name, _, _ in leaves(CONFIGS[stage])} | set(other_names(CONFIGS[stage]))


def _refuse_passwords(value: Any, where: str) -> None:
    for key, one in value.items() if isinstance(value, dict) else [("", value)]:
        if hold_credentials(one):
            raise ConfigError(
                f"{where}{key and ' ' + key}: a URL with a user or a password would be written "
                "into options and logs; give credentials in the environment instead"
            )


def _check_key(key: str, value: Any, path: str) -> None:
    known = (*TOP_LEVEL, *TABLES)
    if key not in known:
        what = "table" if isinstance(value, dict) else "key"
        if key in _keys_of("pretrain"):
            raise ConfigError(
                f"{path}: {key!r} is an option of pretrain, and a recipe has a table for each "
                f"stage: write it under [pretrain]; or, where this file is a document of pretrain "
                f"as those of recipes/models, name it in a recipe, by its path from there: "
                f'preset = "models/gpt-7b.toml"'
            )
        alike = TABLES if isinstance(value, dict) else TOP_LEVEL
        hint = suggest(key, known, candidates=alike)
        raise ConfigError(f"{path}: unknown {what} {shown(key)}; {hint}")
    if key in TABLES and not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} must be a table, [{key}], got {shown(value)}")
