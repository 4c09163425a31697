"""A Retro project: a folder with a database, its index, tables of neighbours, and the options that
all of them share.

    PROJECT/config.json             the options, under Megatron-LM's keys
    PROJECT/db/                     output of retro_db
    PROJECT/index_empty/            output of faiss_train
    PROJECT/index/                  output of faiss_add
    PROJECT/query/FOLDER/           output of faiss_query; config.json names one for each split
    PROJECT/data/                   token files with relative names"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.urls import has_credentials, is_local, join
from trainyard.config import check_at_least, check_known, from_table, suggest
from trainyard.datasets.config import SPLIT_NAMES, DataConfig, parse_blend, parse_split
from trainyard.datasets.split_sizes import split_sizes
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.config import TokenizerConfig

log = logging.getLogger(__name__)

CONFIG = "config.json"
DATABASE, INDEX, EMPTY_INDEX, QUERY, DATA = "db", "index", "index_empty", "query", "data"

TOKENIZER_FILES = (
    *("retro_gpt_tokenizer_model", "retro_gpt_vocab_file", "retro_gpt_merge_file"),
    "retro_bert_vocab_file",
)
"""Keys with files of tokenizers."""

GUIDES = {
    "retro_bert_chunk_length": "retro_bert_max_chunk_length",
    "retro_num_neighbors_query": "retro_query_num_neighbors_query",
    "retro_index_nprobe": "retro_query_nprobe",
}
"""Keys of guides, and what Megatron-LM calls them."""

WITHOUT_EFFECT = ("retro_index_load", "retro_index_train_load")
"""Keys of guides that no version of Megatron-LM reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """The options of a project. The first ones decide the samples and their chunks; the ones that
    may be missing are for single steps."""

    retro_gpt_seed: int = 1234
    retro_gpt_data_path: tuple[str, ...]
    """Token files with optional weights; relative names are below PROJECT/data."""
    retro_gpt_data_cache_path: str | None = None
    retro_gpt_split: str = "969,30,1"
    retro_gpt_train_samples: int
    retro_gpt_eval_interval: int
    retro_gpt_eval_iters: int
    retro_gpt_tokenizer_type: str
    retro_gpt_tokenizer_model: str | None = None
    """This and the next files: relative names are below PROJECT."""
    retro_gpt_vocab_file: str | None = None
    retro_gpt_merge_file: str | None = None
    retro_gpt_seq_length: int
    retro_gpt_global_batch_size: int
    retro_gpt_chunk_length: int = 64
    retro_block_size: int = 100000
    retro_bert_tokenizer_type: str
    retro_bert_vocab_file: str
    retro_neighbor_dirs: dict[str, str | None] = field(default_factory=dict)
    """For each split the folder of its neighbours, below PROJECT/query."""

    retro_doc_block_size: int | None = None
    retro_bert_batch_size: int | None = None
    retro_bert_max_chunk_length: int | None = None
    retro_index_type: str | None = None
    retro_index_str: str | None = None
    retro_index_ntrain: int | None = None
    retro_index_train_load_fraction: float | None = None
    retro_index_add_load_fraction: float | None = None
    retro_query_ef_search: int | None = None
    retro_query_nprobe: int | None = None
    retro_query_num_neighbors_query: int | None = None
    retro_query_num_neighbors_save: int | None = None
    retro_num_neighbors: int | None = None
    """Of the training: neighbours of a chunk."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        check_at_least(
            self,
            1,
            *("retro_gpt_train_samples", "retro_gpt_eval_interval", "retro_gpt_seq_length"),
            *("retro_gpt_global_batch_size", "retro_gpt_chunk_length", "retro_block_size"),
            *("retro_num_neighbors", "retro_query_num_neighbors_save"),
        )
        check_at_least(self, 0, "retro_gpt_seed", "retro_gpt_eval_iters")
        parse_split(self.retro_gpt_split, "retro_gpt_split")
        if not parse_blend(self.retro_gpt_data_path, "retro_gpt_data_path"):
            raise ConfigError("retro_gpt_data_path names no token files")
        for split in self.retro_neighbor_dirs:
            if split not in SPLIT_NAMES:
                raise ConfigError(
                    f"retro_neighbor_dirs: unknown split {split!r}; {suggest(split, SPLIT_NAMES)}"
                )

    @property
    def num_neighbors(self) -> int:
        """Neighbours of a chunk in training, 2 unless given."""
        return self.retro_num_neighbors or 2

    def sizes(self) -> tuple[int, int, int]:
        """Samples of training, validation and test data."""
        samples, size = self.retro_gpt_train_samples, self.retro_gpt_global_batch_size
        return split_sizes(
            samples,
            samples // size,
            eval_interval=self.retro_gpt_eval_interval,
            eval_iters=self.retro_gpt_eval_iters,
            global_batch_size=size,
        )

    def to_document(self) -> dict[str, Any]:
        """JSON-able; options of steps only where they are given."""
        optional = {
            one.name for one in fields(self) if one.default is None and _is_of_step(one.name)
        }
        document = asdict(self)
        document["retro_gpt_data_path"] = list(self.retro_gpt_data_path)
        return {k: v for k, v in document.items() if v is not None or k not in optional}


def _is_of_step(name: str) -> bool:
    names = [one.name for one in fields(ProjectConfig)]
    return names.index(name) > names.index("retro_neighbor_dirs")


@dataclass(frozen=True, slots=True)
class Project:
    """A project, with the places of its parts."""

    url: str
    config: ProjectConfig

    @property
    def database(self) -> str:
        """The folder of the chunk database."""
        return join(self.url, DATABASE)

    @property
    def index(self) -> str:
        """The folder of the filled index."""
        return join(self.url, INDEX)

    @property
    def empty_index(self) -> str:
        """The folder of the trained index without vectors."""
        return join(self.url, EMPTY_INDEX)

    def splits(self) -> list[str]:
        """Those with a table of neighbours."""
        return [split for split in SPLIT_NAMES if self.has_neighbors(split)]

    def has_neighbors(self, split: str) -> bool:
        """Whether the project names a table of neighbours for a split."""
        return bool(self.config.retro_neighbor_dirs.get(split))

    def neighbors(self, split: str) -> str:
        """The folder of a split's neighbours. Raises ConfigError if there is none."""
        folder = self.config.retro_neighbor_dirs.get(split)
        if not folder:
            raise ConfigError(
                f"{join(self.url, CONFIG)}: retro_neighbor_dirs names no folder for {split}; run "
                f"faiss_query with --retro-query-split {split} and name its output there"
            )
        return join(self.url, QUERY, folder.removeprefix(f"{QUERY}/"))

    def data(self) -> DataConfig:
        """The data of the training."""
        paths = [
            word
            for source in parse_blend(self.config.retro_gpt_data_path, "retro_gpt_data_path")
            for word in (
                *(() if source.weight is None else (repr(source.weight),)),
                self._at(source.prefix, DATA),
            )
        ]
        return DataConfig(data_path=tuple(paths), split=self.config.retro_gpt_split)

    def prefixes(self) -> list[str]:
        """The token files, in the order of the blend, each once."""
        return list(dict.fromkeys(source.prefix for source in self.data().sources("train")))

    def gpt_tokenizer(self) -> TokenizerConfig:
        """The tokenizer of the token files."""
        config = self.config
        return from_table(
            TokenizerConfig,
            {
                "tokenizer_type": config.retro_gpt_tokenizer_type,
                "tokenizer_model": self._file(config.retro_gpt_tokenizer_model),
                "vocab_file": self._file(config.retro_gpt_vocab_file),
                "merge_file": self._file(config.retro_gpt_merge_file),
            },
            join(self.url, CONFIG),
        )

    def bert_tokenizer(self) -> TokenizerConfig:
        """The tokenizer of the model that embeds chunks."""
        config = self.config
        return from_table(
            TokenizerConfig,
            {
                "tokenizer_type": config.retro_bert_tokenizer_type,
                "vocab_file": self._file(config.retro_bert_vocab_file),
            },
            join(self.url, CONFIG),
        )

    def tokenizer_files(self) -> dict[str, str]:
        """The files of both tokenizers, by the keys that name them."""
        found = {key: self._file(getattr(self.config, key)) for key in TOKENIZER_FILES}
        return {key: url for key, url in found.items() if url is not None}

    def _file(self, name: str | None) -> str | None:
        return None if name is None else self._at(name)

    def _at(self, name: str, folder: str = "") -> str:
        if name.startswith("/") or not is_local(name):
            return name
        return join(self.url, folder, name) if folder else join(self.url, name)


def read_project(url: str) -> Project:
    """The project in a folder. Raises ConfigError for a key or value that it cannot have."""
    where = join(url, CONFIG)
    if not store.exists(where):
        raise ArtifactError(f"{where} is missing: not the folder of a Retro project")
    document = store.read_json(where)
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: not a JSON object")
    if has_credentials(json.dumps(document)):
        raise ConfigError(
            f"{where} has a URL with a user or a password, which would be written into logs; give "
            "credentials in the environment instead"
        )
    return Project(url, from_table(ProjectConfig, options_of(document, where), where))


def write_project(project: Project) -> None:
    """Write the project's config.json."""
    text = json.dumps(project.config.to_document(), indent=4) + "\n"
    store.write_bytes(join(project.url, CONFIG), text.encode())


def with_neighbors(project: Project, split: str, folder: str) -> Project:
    """The project with a folder below PROJECT/query as the neighbours of a split."""
    folders: dict[str, str | None] = dict.fromkeys(SPLIT_NAMES)
    folders = {**folders, **project.config.retro_neighbor_dirs, split: folder}
    return replace(project, config=replace(project.config, retro_neighbor_dirs=folders))


def with_data(project: Project, prefixes: Sequence[str]) -> Project:
    """The project with other token files in the places of its own; their weights stay."""
    sources = parse_blend(project.config.retro_gpt_data_path, "retro_gpt_data_path")
    if len(prefixes) != len(sources):
        raise ConfigError(
            f"--retro-gpt-data-path names {len(prefixes)} prefixes, and "
            f"{join(project.url, CONFIG)} has {len(sources)}: "
            + ", ".join(source.prefix for source in sources)
            + "; name one for each, without weights"
        )
    words = [
        word
        for source, prefix in zip(sources, prefixes, strict=True)
        for word in (*(() if source.weight is None else (repr(source.weight),)), prefix)
    ]
    config = replace(project.config, retro_gpt_data_path=tuple(words))
    return replace(project, config=config)


def options_of(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options in a document, which may be a part of them, under Megatron-LM's keys and without
    nulls that stand for a default. Raises ConfigError for an unknown key."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key in WITHOUT_EFFECT:
            log.warning("%s: %s has no effect, as what is finished is always used", where, key)
            continue
        name = GUIDES.get(key, key)
        if name in found and found[name] != value:
            other = next(k for k in document if k != key and GUIDES.get(k, k) == name)
            raise ConfigError(f"{where}: {key} {value} and {other} {found[name]} are one option")
        found[name] = value
    check_known(found, (one.name for one in fields(ProjectConfig)), where)
    paths = found.get("retro_gpt_data_path")
    if isinstance(paths, str):
        found["retro_gpt_data_path"] = paths.split()
    elif isinstance(paths, list):
        found["retro_gpt_data_path"] = [str(word) for word in paths]
    defaults = {
        one.name: one.default is not MISSING or one.default_factory is not MISSING
        for one in fields(ProjectConfig)
    }
    return {k: v for k, v in found.items() if v is not None or not defaults.get(k, False)}
