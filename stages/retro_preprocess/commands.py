"""The command lines of the stages that build a Retro project. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stages.retro_preprocess.config import RetroPreprocessConfig
from trainyard.artifacts.urls import join
from trainyard.config import flag, from_dict
from trainyard.datasets.config import SPLIT_NAMES
from trainyard.errors import ConfigError
from trainyard.retrieval.index_choice import check_points
from trainyard.retrieval.project import DATABASE, EMPTY_INDEX, INDEX, QUERY, Project
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.training.options.samples import RunSamplesConfig

EMBEDDINGS = "embeddings"
"""Folder of a project that Megatron-LM does not have."""


@dataclass(frozen=True, slots=True)
class Command:
    """A stage with its flags."""

    stage: str
    options: Mapping[str, Any]
    split: str | None = None
    """Of the neighbours that it finds."""

    def __post_init__(self) -> None:
        """Refuse a value that the stage would take for another option."""
        for name, value in self.options.items():
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, str) and one.startswith("-"):
                    raise ConfigError(f"{flag(name)} {one!r} would be read as another option")

    def argv(self) -> list[str]:
        """The command line after the interpreter."""
        words = ["-m", f"stages.{self.stage}"]
        for name, value in self.options.items():
            words += _words(name, value)
        return words


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False or value == ():
        return []
    if value is True:
        return [flag(name)]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [flag(name), *map(str, values)]


class Commands:
    """The commands of each step of a project."""

    def __init__(self, config: RetroPreprocessConfig, project: Project) -> None:
        self._config, self._project = config, project

    def of_step(self, step: str) -> Iterator[Command]:
        """In order. Raises ConfigError for an option that the step needs."""
        if step == "db-build":
            self._check_training()  # the sample is drawn here
            yield self._database()
        elif step == "index-train":
            self._check_training()
            yield self._embed_database("sampled")
            if self._config.retro_task_validate is None:  # it has no blocks
                yield self._train()
        elif step == "index-add":
            yield self._embed_database("train")
            yield self._add()
        else:
            for split in self.splits():
                yield self._embed_samples(split)
                yield self._query(split)

    def splits(self) -> Iterator[str]:
        """Those of which the training takes samples."""
        for split, size in zip(SPLIT_NAMES, self._project.config.sizes(), strict=True):
            begin, end = self._project.data().fractions(split)
            if size and begin < end:
                yield split

    def samples(self) -> RunSamplesConfig:
        """The options of the training that decide its samples."""
        given = {name: value for name, value in self._samples().items() if value is not None}
        return from_dict(RunSamplesConfig, given)

    def _at(self, *parts: str) -> str:
        return join(self._project.url, *parts)

    def _embeddings(self, name: str) -> str:
        return self._at(EMBEDDINGS, name)

    def _check_training(self) -> None:
        """Refuse an index that the sample cannot train, before the first chunk is cut."""
        config = self._project.config
        if config.retro_index_ntrain is None:
            return
        share = config.retro_index_train_load_fraction or 1.0
        check_points(
            config.retro_index_str,
            math.ceil(config.retro_index_ntrain * share),
            f"--retro-index-ntrain {config.retro_index_ntrain}"
            + ("" if share == 1 else f" with --retro-index-train-load-fraction {share}"),
            "raise it",
        )

    # --- steps ----------------------------------------------------------------------------

    def _database(self) -> Command:
        config = self._project.config
        if config.retro_index_ntrain is None:
            raise ConfigError("db-build needs --retro-index-ntrain, the chunks to train the index")
        return Command(
            "retro_db",
            {
                **self._data(),
                **_tokenizer(self._project.gpt_tokenizer()),
                **self._vocabulary(),
                "retro_index_ntrain": config.retro_index_ntrain,
                "retro_sample_mode": self._config.retro_sample_mode,
                "retro_gpt_split": config.retro_gpt_split,
                "retro_gpt_chunk_length": config.retro_gpt_chunk_length,
                "retro_doc_block_size": config.retro_doc_block_size,
                "retro_task_validate": self._config.retro_task_validate,
                "output_dir": self._at(DATABASE),
            },
        )

    def _embed_database(self, chunks: str) -> Command:
        options = {"retro_db": self._at(DATABASE), "data_path": self._project.prefixes()}
        return self._embed(chunks, chunks, options)

    def _embed_samples(self, split: str) -> Command:
        options = {"retro_query_split": split, **self._samples(), **self._length()}
        return self._embed("pretraining", f"samples_{split}", options)

    def _embed(self, chunks: str, name: str, source: Mapping[str, Any]) -> Command:
        given, config = self._config, self._project.config
        if given.load is None and given.embedder is None:
            raise ConfigError("embedding chunks needs --load, the BERT that embeds them")
        return Command(
            "retro_embed",
            {
                "chunks": chunks,
                **source,
                **_tokenizer(self._project.gpt_tokenizer()),
                **(self._vocabulary() if given.embedder is None else {}),
                "load": given.load,
                "embedder": given.embedder,
                "pooling": given.pooling,
                "normalize": given.normalize,
                "retro_bert_batch_size": config.retro_bert_batch_size,
                "retro_bert_max_chunk_length": config.retro_bert_max_chunk_length,
                "retro_index_str": config.retro_index_str if chunks == "sampled" else None,
                "retro_block_size": config.retro_block_size,
                "retro_task_validate": given.retro_task_validate,
                "bf16": given.bf16,
                "fp16": given.fp16,
                "nproc_per_node": given.nproc_per_node if given.nproc_per_node > 1 else None,
                "output_dir": self._embeddings(name),
            },
        )

    def _train(self) -> Command:
        config = self._project.config
        return Command(
            "faiss_train",
            {
                "embeddings": self._embeddings("sampled"),
                "retro_index_str": config.retro_index_str,
                "retro_index_train_load_fraction": config.retro_index_train_load_fraction,
                "output_dir": self._at(EMPTY_INDEX),
            },
        )

    def _add(self) -> Command:
        config = self._project.config
        return Command(
            "faiss_add",
            {
                "index": self._at(EMPTY_INDEX),
                "embeddings": self._embeddings("train"),
                "retro_index_add_load_fraction": config.retro_index_add_load_fraction,
                "retro_query_nprobe": config.retro_query_nprobe,
                "retro_query_num_neighbors_save": config.retro_query_num_neighbors_save,
                "target_recall": self._config.target_recall,
                "retro_min_recall": self._config.retro_min_recall,
                "retro_task_validate": self._config.retro_task_validate,
                "output_dir": self._at(INDEX),
            },
        )

    def _query(self, split: str) -> Command:
        config = self._project.config
        return Command(
            "faiss_query",
            {
                "retro_query_split": split,
                **self._samples(),
                **self._length(),
                "index": self._at(INDEX),
                "retro_db": self._at(DATABASE),
                "embeddings": self._embeddings(f"samples_{split}"),
                "retro_query_ef_search": config.retro_query_ef_search,
                "retro_query_nprobe": config.retro_query_nprobe,
                "retro_query_gpus": self._config.retro_query_gpus,
                "retro_query_num_neighbors_query": config.retro_query_num_neighbors_query,
                "retro_query_num_neighbors_save": config.retro_query_num_neighbors_save,
                "retro_exclude_evaluation": self._config.retro_exclude_evaluation,
                "retro_exclude_run": self._config.retro_exclude_run,
                "retro_block_size": config.retro_block_size,
                "retro_task_validate": self._config.retro_task_validate,
                "output_dir": self._at(QUERY, split),
            },
            split,
        )

    # --- shared options -------------------------------------------------------------------

    def _data(self) -> dict[str, Any]:
        return {"data_path": self._project.data().data_path}

    def _samples(self) -> dict[str, Any]:
        config = self._project.config
        return {
            **self._data(),
            "split": config.retro_gpt_split,
            "data_cache_path": config.retro_gpt_data_cache_path,
            "seq_length": config.retro_gpt_seq_length,
            "global_batch_size": config.retro_gpt_global_batch_size,
            "train_samples": config.retro_gpt_train_samples,
            "eval_interval": config.retro_gpt_eval_interval,
            "eval_iters": config.retro_gpt_eval_iters,
            "seed": config.retro_gpt_seed,
        }

    def _length(self) -> dict[str, int]:
        return {"retro_gpt_chunk_length": self._project.config.retro_gpt_chunk_length}

    def _vocabulary(self) -> dict[str, Any]:
        bert = self._project.bert_tokenizer()
        return {
            "retro_bert_tokenizer_type": bert.tokenizer_type,
            "retro_bert_vocab_file": bert.vocab_file,
        }


def _tokenizer(config: TokenizerConfig) -> dict[str, Any]:
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    return {name: getattr(config, name) for name in names}
