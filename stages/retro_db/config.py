"""Options of `python -m stages.retro_db`, by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_RANKS,
    also,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.datasets.config import Source, parse_blend, parse_split
from trainyard.errors import ConfigError
from trainyard.retrieval.dataset_names import dataset_names
from trainyard.tokenizers.config import TokenizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroDbConfig(FolderInShares):
    """Cut the documents of token files into chunks for Retro's neighbours.

    The bytes written depend on the token files and the options alone: not on workers, shares, or on
    how often the run was killed."""

    data_path: tuple[str, ...] = also("retro_gpt_data_path", role="location")
    """Prefixes of .bin/.idx pairs: WEIGHT PREFIX WEIGHT PREFIX ..., or PREFIX ...; the weights
    divide --retro-index-ntrain. Also --retro-gpt-data-path."""
    output_dir: str = location()
    """Folder or URL for the database."""
    tokenizer: TokenizerConfig
    retro_bert_tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase"]
    """Tokenizer of the model that will embed the chunks."""
    retro_bert_vocab_file: str = location()
    """Its vocab.txt."""
    retro_index_ntrain: int
    """Number of chunks to sample, which train the index. If there are fewer, all are used."""
    retro_sample_mode: Literal["uniform", "prefix"] = "uniform"
    """uniform: a random sample of each dataset's training chunks. prefix: the first ones, as in
    Megatron-LM."""
    retro_sample_seed: int = 1234
    """Seed of the sample."""
    retro_gpt_split: str = "969,30,1"
    """Relative parts of the documents for training, validation and testing. Chunks of training
    documents can become neighbours."""
    retro_gpt_chunk_length: int = 64
    """GPT tokens of a chunk; the last chunk of a document may be shorter."""
    retro_doc_block_size: int = 100000
    """Documents of a block: a file, and what a killed run keeps."""
    retro_base_db: str | None = location(None)
    """A finished database of the first datasets of --data-path: their chunks are taken from it
    instead of being cut again. The result is the same."""
    retro_task_validate: float | None = execution(None)
    """Write nothing: cut this share of the blocks in --output-dir again, a seeded sample, and
    compare."""
    workers: int | None = execution(None)
    """Number of workers, at most the number of cores. Unset: the number of cores."""
    rank: int | None = execution(None)
    """With --world-size: cut only this share of the blocks, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            *("retro_index_ntrain", "retro_gpt_chunk_length", "retro_doc_block_size", "workers"),
            "world_size",
        )
        check_at_most(self, MAX_RANKS, "world_size")
        self.check_rank()
        check_at_least(self, 0, "retro_sample_seed")
        share = self.retro_task_validate
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                "--retro-task-validate is a share of the blocks, above 0 and at most 1, got "
                f"{share}"
            )
        if share is not None and self.world_size is not None:
            raise ConfigError("--retro-task-validate checks a whole output; leave --world-size out")
        if self.train_fraction() <= 0:
            raise ConfigError(
                f"--retro-gpt-split {self.retro_gpt_split!r}: the first number is the part for "
                "training and must be above 0, as only training documents get into the database"
            )
        sources = self.sources()
        if not sources:
            raise ConfigError("--data-path names no pair of token files")
        for source in sources:
            if source.weight is not None and not 0 < source.weight < float("inf"):
                raise ConfigError(
                    f"--data-path: the weight of {source.prefix} must be above 0, got "
                    f"{source.weight}; leave a corpus out that is not wanted"
                )
        self.names()

    def sources(self) -> list[Source]:
        """The corpora, in order."""
        return parse_blend(self.data_path, "--data-path")

    def names(self) -> list[str]:
        """What the datasets are called in the output."""
        return dataset_names([source.prefix for source in self.sources()])

    def train_fraction(self) -> float:
        """The part of the documents that is for training."""
        return parse_split(self.retro_gpt_split, "--retro-gpt-split")[0][1]

    def bert(self) -> TokenizerConfig:
        """The tokenizer of the embedding model."""
        return TokenizerConfig(
            tokenizer_type=self.retro_bert_tokenizer_type, vocab_file=self.retro_bert_vocab_file
        )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The tokenizers' files and every prefix. Its weight and name are part of the input's
        name, so that a change of them is a change of the inputs."""
        named: dict[str, tuple[str, ...]] = {}
        for i, (source, name) in enumerate(zip(self.sources(), self.names(), strict=True)):
            weight = "" if source.weight is None else f"weight {source.weight!r}, "
            named[f"data_{i} ({weight}name {name})"] = (source.prefix,)
        return {
            **named,
            "tokenizer": self.tokenizer.inputs(),
            "bert": (self.retro_bert_vocab_file,),
            **({} if self.retro_base_db is None else {"base": (self.retro_base_db,)}),
        }

    def versions(self) -> dict[str, str]:
        """Of the libraries that define the tokens."""
        return {**self.tokenizer.versions(), **self.bert().versions()}

    def output(self) -> Output | None:
        """The folder of the database, or of a share; None if blocks are only compared."""
        if self.retro_task_validate is not None:
            return None
        return self.own_folder()
