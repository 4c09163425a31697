"""Options of a flow run that override its recipe: fields of a form, and text.

The text is TOML as in a recipe, or lines such as `pretrain.lr = 2e-3`, in which a value may lack
its quotes. Names and types are checked against the options of the stages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flows.recipes.recipe import CONTINUATIONS, FETCH, FINETUNE, OF_ENCODER, stage_of
from flows.stage_configs import CONFIGS
from trainyard.config import check_known, convert, leaves, other_names, suggest
from trainyard.config_text import parse_document
from trainyard.errors import ConfigError

AS_RECIPE: Literal["as the recipe says"] = "as the recipe says"
Choice = Literal["as the recipe says", True, False]
"""A switch of a form. Not a boolean: Prefect's form sends false for each one that it shows."""

TOP_LEVEL: dict[str, Any] = {
    "corpus": tuple[str, ...],
    "evaluation_data": str,
    "tokens": str,
    "encoder": str,
    "base": str,
}
"""Keys above the tables of a recipe, with their types."""

CORPUS_STAGES = ("collect", "train_tokenizer", "tokenize", "merge")
COLLECTION_STAGES = (FETCH, "collect", "clean", "dedup", "decontaminate", "mix", "datasheet")
RELEASE_STAGES = ("reshard", "evaluate", "benchmark")
RETRO_STAGES = ("retro_db", "retro_embed", "faiss_train", "faiss_add", "faiss_query")
GPT_KEYS = ("corpus", "evaluation_data", "tokens")

STAGES_OF: dict[str, tuple[str, ...]] = {
    "collect-corpus": COLLECTION_STAGES,
    "build-retro": (*CORPUS_STAGES, *OF_ENCODER, *RETRO_STAGES, "pretrain"),
    "detoxify-gpt": ("generate", "score", "tokenize", "pretrain", CONTINUATIONS, "evaluate"),
    "finetune-gpt": ("collect", FINETUNE, "evaluate", "benchmark"),
    "prepare-corpus": CORPUS_STAGES,
    "pretrain-bert": (*CORPUS_STAGES, "plan", "pretrain"),
    "pretrain-t5": (*CORPUS_STAGES, "plan", "pretrain"),
    "pretrain-retro": (*CORPUS_STAGES, *OF_ENCODER, *RETRO_STAGES, "plan", "pretrain"),
    "pretrain-gpt": (*CORPUS_STAGES, "plan", "pretrain", *RELEASE_STAGES),
    "release": RELEASE_STAGES,
    "corpus-refresh": ("tokenize", "merge", "retro_db", "retro_embed", "faiss_train", "faiss_add"),
}
"""The stages of each flow that runs a recipe, whose options it lets override."""
KEYS_OF: dict[str, tuple[str, ...]] = {
    "collect-corpus": ("corpus",),
    "build-retro": (*GPT_KEYS, "encoder"),
    "detoxify-gpt": ("base", "evaluation_data"),
    "finetune-gpt": ("base", "evaluation_data"),
    "prepare-corpus": GPT_KEYS,
    "pretrain-bert": ("corpus", "tokens"),
    "pretrain-t5": ("corpus", "tokens"),
    "pretrain-retro": (*GPT_KEYS, "encoder"),
    "pretrain-gpt": GPT_KEYS,
    "release": ("evaluation_data",),
    "corpus-refresh": ("corpus", "encoder"),
}
"""The keys above the tables that each of them uses."""

DECIDED: dict[str, tuple[str, ...]] = {
    "collect": ("output_dir",),
    "clean": ("input", "output_dir", "rank", "world_size"),
    "datasheet": ("documents", "folders", "output_prefix"),
    "decontaminate": ("input", "output_dir", "rank", "world_size"),
    "dedup": ("input", "output_dir", "rank", "world_size"),
    "mix": ("output_dir", "rank", "world_size"),
    "generate": ("load", "output_dir"),
    "score": ("input", "json_key", "output_dir", "prompt_path", "rank", "world_size"),
    "train_tokenizer": ("input", "output_dir"),
    "tokenize": ("input", "output_prefix", "rank", "world_size"),
    "merge": ("input", "output_prefix"),
    "plan": ("output_dir", "json"),
    "pretrain": ("data_path",),
    "reshard": ("load_dir", "save_dir"),
    "retro_db": ("data_path", "output_dir", "rank", "retro_base_db", "world_size"),
    "retro_embed": (
        *("chunks", "data_path", "load", "output_dir", "retro_base_db", "retro_db"),
        "retro_query_split",
    ),
    "faiss_train": ("embeddings", "output_dir"),
    "faiss_add": ("embeddings", "index", "keep_shards", "output_dir", "rank", "world_size"),
    "faiss_query": (
        *("data_path", "embeddings", "index", "output_dir", "rank", "retro_db"),
        *("retro_query_split", "world_size"),
    ),
    "evaluate": ("load", "valid_data", "output_dir"),
    "benchmark": ("load", "output_dir"),
}
"""Options that flows decide, by stage."""
INSTEAD = {
    "data_path": ". The tokens are those that the recipe makes: set tokens for others",
}
"""What to set instead of those that people look for."""

WHERE = "overrides"
LINE = re.compile(r"(?P<name>[\w-]+(\.[\w-]+)*)\s*=\s*(?P<value>.*)")
TABLE = re.compile(r"\[\s*(?P<name>[\w-]+)\s*\]")
COMMENT = re.compile(r"\s#.*")

Document = Mapping[str, Any]
"""Tables of stages and keys above them, as in a recipe."""


def read_overrides(flow: str, text: str | None, **fields: Any) -> dict[str, Any]:
    """What overrides the recipe of a flow: the fields of its form that are filled in, and the text.

    fields: values of keys above the tables, and a mapping for a table. Raises ConfigError for an
    unknown name, a wrong type, or an option that is given twice."""
    found = check_document(parse_text(text or ""), STAGES_OF[flow], KEYS_OF[flow])
    for name, value in fields.items():
        is_table = isinstance(value, Mapping)
        given = found.setdefault(name, {}) if is_table else found
        for key, one in (value if is_table else {name: value}).items():
            if one in (None, "", AS_RECIPE):
                continue
            if key in given:
                full = f"{name}.{key}" if is_table else key
                raise ConfigError(f"{full} is given twice: as {key}, and in {WHERE}; give it once")
            given[key] = one
    return {name: value for name, value in found.items() if value != {}}


def names_of(flow: str) -> dict[str, list[str]]:
    """The names that the text may have: of options by stage, and under "" of keys above tables."""
    found = {"": list(KEYS_OF[flow])}
    for stage in STAGES_OF[flow]:
        options, decided = CONFIGS[stage_of(stage)], DECIDED.get(stage_of(stage), ())
        names = {name: name for name, _, _ in leaves(options)} | dict(other_names(options))
        found[stage] = [given for given, name in names.items() if name not in decided]
    return found


# --- the text -------------------------------------------------------------------------------------


def parse_text(text: str, where: str = WHERE) -> dict[str, Any]:
    """The document in a text; ConfigError if it is neither TOML nor lines of options."""
    try:
        return parse_document(text, ".toml", where)
    except ConfigError as error:
        return _parse_lines(text, error, where)


def _parse_lines(text: str, error: ConfigError, where: str) -> dict[str, Any]:
    """The same line by line, where a value that is not TOML is a string."""
    document: dict[str, Any] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        if found := TABLE.fullmatch(bare):
            table = found["name"]
            continue
        found = LINE.fullmatch(bare)
        if found is None:
            raise ConfigError(
                f"{where}: line {number}, {bare!r}, is not STAGE.KEY = VALUE, such as "
                f"pretrain.lr = 2e-3"
            ) from error
        _put(
            document,
            [table, *found["name"].split(".")],
            _value(found["value"], f"{where}: line {number}"),
            where,
        )
    return document


def _value(written: str, where: str) -> Any:
    try:
        return parse_document(f"x = {written}", ".toml", where)["x"]
    except ConfigError as error:
        bare = COMMENT.sub("", written).strip()
        if not bare or bare[0] in "[{\"'":
            raise ConfigError(f"{where}: the value is not valid TOML: {written[:40]!r}") from error
        return bare


def _put(document: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    names = [name for name in path if name]
    for name in names[:-1]:
        inner = document.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: {name} is a value and a table; give one")
        document = inner
    if names[-1] in document:
        raise ConfigError(f"{where}: {'.'.join(names)} is given twice; give it once")
    document[names[-1]] = value


# --- its names and types --------------------------------------------------------------------------


def check_document(
    document: Document, stages: Sequence[str], top_level: Sequence[str]
) -> dict[str, Any]:
    """The document with converted values; ConfigError for an unknown name or a wrong type."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if name in top_level:
            found[name] = convert(value, TOP_LEVEL[name], f"{WHERE}: {name}")
        elif name in stages:
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{WHERE}: {name} is a stage: write {name}.KEY = VALUE, not {value!r}"
                )
            found[name] = check_table(name, value)
        else:
            raise ConfigError(f"{WHERE}: {_unknown(name, stages, top_level)}")
    return found


def check_table(stage: str, table: Document) -> dict[str, Any]:
    """Options of a stage with converted values; ConfigError for an unknown name or wrong type."""
    options = CONFIGS[stage_of(stage)]
    types = {name: annotation for name, annotation, _ in leaves(options)}
    others, decided = other_names(options), DECIDED.get(stage_of(stage), ())
    known = [name for name in types if name not in decided]
    found = {}
    for key, value in table.items():
        name = others.get(key, key)
        if name in decided:
            instead = INSTEAD.get(name, "")
            raise ConfigError(
                f"{WHERE}: {stage}.{key} is decided by the flow; leave it out{instead}"
            )
        check_known([name], known, f"{WHERE}: {stage}")
        if name in found:
            raise ConfigError(f"{WHERE}: {stage}.{name} is given twice; give it once")
        found[name] = _plain(convert(value, types[name], f"{WHERE}: {stage}.{key}"))
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _unknown(name: str, stages: Sequence[str], top_level: Sequence[str]) -> str:
    """Why a name above the tables is wrong, and what to write instead."""
    owners = [
        stage for stage in stages if name in {key for key, _, _ in leaves(CONFIGS[stage_of(stage)])}
    ]
    if owners:
        return f"{name} is an option of {' and '.join(owners)}: write {owners[0]}.{name} = VALUE"
    if name in CONFIGS:
        return f"this flow has no stage {name}; stages: {', '.join(stages)}"
    return f"unknown stage or key {name!r}; {suggest(name, [*stages, *top_level])}"
