"""Options of `python -m stages.retro_embed`, by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stages.retro_embed.chunk_options import CHUNKS, ChunkOptions
from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_PROCESSES,
    MAX_RANKS,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.embedding.config import EmbeddingConfig
from trainyard.embedding.installed import version_of
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroEmbedConfig(FolderInShares):
    """Turn the text of chunks into vectors, by the encoder of a BERT or a function of your own.

    On CPUs the bytes written depend on the input and the options alone: not on workers, ranks,
    shares, or on how often the run was killed."""

    source: ChunkOptions = field(metadata=CHUNKS)
    tokenizer: TokenizerConfig
    load: str | None = location(None)
    """Encoder: a checkpoint of a BERT, as the folder of a run (its latest step), of one step, of
    Hugging Face (BertModel, sentence encoders, MegatronBert...) or of Megatron-LM."""
    embedder: str | None = None
    """Instead of --load: an embedder of an installed package, by its entry point in
    trainyard.embedders."""
    retro_bert_tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase"] | None = None
    """Tokenizer of the encoder. Unset: the one in its folder."""
    retro_bert_vocab_file: str | None = location(None)
    """Its vocab.txt. Unset: the one in its folder."""
    embedding: EmbeddingConfig
    retro_index_str: str | None = execution(None)
    """With --chunks sampled: the index that will be trained, for faiss's index_factory. One with
    more lists than these chunks suffice for is refused before any is embedded."""
    retro_block_size: int = 100000
    """Chunks of a block: a file, and what a killed run keeps."""
    retro_task_validate: float | None = execution(None)
    """Write nothing: compute this share of the blocks in --output-dir again, a seeded sample, and
    compare."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    workers: int | None = execution(None)
    """On a CPU, number of threads of a rank. Unset: the number of cores, divided among the ranks of
    the machine."""
    nproc_per_node: int = execution(1)
    """Number of ranks to start on this machine, each with a GPU of its own if they have any. Under
    torchrun, or a scheduler that sets RANK, each process is a rank already."""
    rank: int | None = execution(None)
    """With --world-size: make only this share of the blocks, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""
    output_dir: str = location()
    """Folder or URL for the blocks."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "retro_block_size", "workers", "nproc_per_node", "world_size")
        check_at_most(self, MAX_PROCESSES, "nproc_per_node")
        check_at_most(self, MAX_RANKS, "world_size")
        self._check_embedder()
        self._check_share()
        if self.retro_task_validate is not None and not 0 < self.retro_task_validate <= 1:
            raise ConfigError(
                "--retro-task-validate is a share of the blocks, above 0 and at most 1, got "
                f"{self.retro_task_validate}"
            )
        if self.retro_index_str is not None and self.source.chunks != "sampled":
            raise ConfigError("--retro-index-str is for --chunks sampled; leave it out")

    def _check_embedder(self) -> None:
        if (self.load is None) == (self.embedder is None):
            given = "both were" if self.load else "neither was"
            raise ConfigError(
                "one of --load (the checkpoint of a BERT) and --embedder (a function of an "
                f"installed package) is needed, and {given} given"
            )
        kind, file = self.retro_bert_tokenizer_type, self.retro_bert_vocab_file
        if (kind is None) != (file is None):
            missing = "tokenizer-type" if kind is None else "vocab-file"
            raise ConfigError(
                "--retro-bert-tokenizer-type and --retro-bert-vocab-file belong together; add "
                f"--retro-bert-{missing}, or leave both out for those of the encoder"
            )
        if self.embedder is not None and file is not None:
            raise ConfigError("--retro-bert-vocab-file is for --load; --embedder takes texts")

    def _check_share(self) -> None:
        if self.world_size is not None and self.retro_task_validate is not None:
            raise ConfigError("--retro-task-validate checks a whole output; leave --world-size out")
        self.check_rank()

    def bert(self) -> TokenizerConfig | None:
        """The given tokenizer of the encoder; None for its own."""
        if self.retro_bert_tokenizer_type is None:
            return None
        return TokenizerConfig(
            tokenizer_type=self.retro_bert_tokenizer_type, vocab_file=self.retro_bert_vocab_file
        )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The chunks and their token files, the tokenizers, the encoder."""
        bert = self.retro_bert_vocab_file
        return {
            **self.source.inputs(),
            "tokenizer": self.tokenizer.inputs(),
            "load": () if self.load is None else (self.load,),
            "bert": () if bert is None else (bert,),
        }

    def versions(self) -> dict[str, str]:
        """Of the libraries that define the tokens, or of the package that embeds."""
        if self.embedder is not None:
            return {**self.tokenizer.versions(), **version_of(self.embedder)}
        word_pieces = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file="any")
        return {**self.tokenizer.versions(), **word_pieces.versions()}

    def output(self) -> Output | None:
        """The folder of the blocks, or of a share; None if they are only compared."""
        if self.retro_task_validate is not None:
            return None
        return self.own_folder()
