"""Looks into a Retro project: chunks, samples and their neighbours as tokens and text.

    from trainyard.retrieval.retro import Retro
    project = Retro.open("retro")
    print(project.get_db_chunk_text(0))

or under the names of Megatron-LM's tools:

    from trainyard.retrieval.retro import retro
    retro.init("retro")
    retro.print_neighbor_texts(0, 3)"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.artifacts import inputs
from trainyard.config import suggest
from trainyard.datasets.config import SPLIT_NAMES
from trainyard.errors import ConfigError, DataError
from trainyard.logging import one_line
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.neighbors import Neighbors
from trainyard.retrieval.pretraining_chunks import NO_TOKEN, PretrainingChunks
from trainyard.retrieval.project import Project, read_project
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.registry import build_tokenizer

Ints = NDArray[np.int64]

USAGE = """\
get_db_num_indexed_datasets()                          datasets of the database
get_db_indexed_dataset_infos()                         their ratios and names
get_db_num_chunks()                                    chunks that can be retrieved
get_db_chunk_gpt(idx), get_db_chunk_bert(idx)          tokens of a chunk
get_db_chunk_text(idx)                                 its text
get_db_chunk_and_continuation_text(idx)                its text and that of the next chunk
get_pt_num_samples(split), get_pt_num_chunks(split)    samples of a training, chunks of them all
get_pt_num_samples_and_chunks(split)                   both
get_pt_sample(split, idx)                              tokens of a sample and of its neighbours
get_pt_sample_gpt(split, idx)                          its tokens
get_pt_sample_text(split, idx)                         its text
get_pt_neighbors_text(split, idx)                      for each chunk, text of every neighbour
get_neighbor_tokens(sample, chunk, split=train)        tokens of a chunk and of its neighbours
print_neighbor_texts(sample, chunk, split=train)       the same as text
gpt_to_text(tokens), text_to_bert(text)                between tokens and text
print_usage()                                          this list
"""


class Retro:
    """A project, opened to look at. Splits are 'train', 'valid' and 'test'."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._database = ChunkDatabase(project.database, project.prefixes())
        self._chunk_length = project.config.retro_gpt_chunk_length
        self._chunks = cache(self._open_chunks)
        self._neighbors = cache(self._open_neighbors)

    @staticmethod
    def open(url: str) -> Retro:
        """The project in a folder."""
        return Retro(read_project(url))

    # --- text and tokens ------------------------------------------------------------------------

    @cached_property
    def gpt_tokenizer(self) -> Tokenizer:
        """The tokenizer of the token files."""
        return build_tokenizer(self.project.gpt_tokenizer())

    @cached_property
    def bert_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that embeds chunks."""
        return build_tokenizer(self.project.bert_tokenizer())

    def gpt_to_text(self, token_ids: ArrayLike) -> str:
        """The text of GPT tokens; padding of a last sample has none.

        Raises DataError for a token that the tokenizer does not have."""
        ids = np.asarray(token_ids, np.int64).ravel()
        ids, size = ids[ids != NO_TOKEN], self.gpt_tokenizer.vocab_size
        if (wrong := ids[(ids < 0) | (ids >= size)]).size:
            raise DataError(
                f"token {wrong[0]}: the tokenizer of {self.project.url} has {size}, from 0; the "
                "token files are of another one, or the token was mistyped"
            )
        return self.gpt_tokenizer.decode(ids.tolist())

    def text_to_bert(self, text: str) -> Ints:
        """(n,) BERT tokens of a text, without [CLS] and [SEP]."""
        return np.array(self.bert_tokenizer.encode(text), np.int64)

    # --- the database ---------------------------------------------------------------------------

    def get_db_num_indexed_datasets(self) -> int:
        """The number of datasets that the database was cut from."""
        return len(self._database.infos)

    def get_db_indexed_dataset_infos(self) -> list[tuple[float, str]]:
        """Ratio and name of each dataset."""
        return [(info.ratio, info.prefix) for info in self._database.infos]

    def get_db_dataset(self) -> ChunkDatabase:
        """The database itself."""
        return self._database

    def get_db_num_chunks(self) -> int:
        """The number of chunks that can be retrieved."""
        return len(self._database)

    def get_db_chunk_gpt(self, idx: int) -> list[int]:
        """GPT tokens of a chunk."""
        tokens: list[int] = self._database.tokens(idx).tolist()
        return tokens

    def get_db_chunk_bert(self, idx: int) -> list[int]:
        """BERT tokens of a chunk's text, without [CLS] and [SEP]."""
        tokens: list[int] = self.text_to_bert(self.get_db_chunk_text(idx)).tolist()
        return tokens

    def get_db_chunk_text(self, idx: int) -> str:
        """The text of a chunk."""
        return self.gpt_to_text(self._database.tokens(idx))

    def get_db_chunk_and_continuation_text(self, idx: int) -> list[str]:
        """The text of a chunk and of the next one of its document; empty after the last one."""
        following = int(self._database.continuations(idx))
        after = "" if following == NO_CHUNK else self.get_db_chunk_text(following)
        return [self.get_db_chunk_text(idx), after]

    # --- samples of the training ----------------------------------------------------------------

    def get_pt_dataset(self, data_key: str) -> PretrainingChunks:
        """The chunks of the samples of a split."""
        return self._chunks(data_key)

    def get_pt_num_samples_and_chunks(self, data_key: str) -> tuple[int, int]:
        """The number of samples of a split, and of the chunks of all of them."""
        chunks = self._chunks(data_key)
        return chunks.num_samples, len(chunks)

    def get_pt_num_samples(self, data_key: str) -> int:
        """The number of samples of a split."""
        return self.get_pt_num_samples_and_chunks(data_key)[0]

    def get_pt_num_chunks(self, data_key: str) -> int:
        """The number of chunks of all samples of a split."""
        return self.get_pt_num_samples_and_chunks(data_key)[1]

    def get_pt_sample(self, data_key: str, idx: int) -> dict[str, Ints]:
        """`text`: (s,) tokens of a sample; `neighbor_ids`: (l, k) chunks of the database, -1 for
        none; `neighbor_tokens`: (l, k, r) tokens of them and of their continuations.

        l chunks of a sample, k neighbours in training, r twice the length of a chunk."""
        chunks = self._chunks(data_key)
        numbers = self._chunks_of(chunks, idx)
        ids = self._neighbors_of(data_key, numbers)
        text = chunks.token_rows(int(numbers[0]), int(numbers[-1]) + 1).ravel()
        return {"text": text, "neighbor_ids": ids, "neighbor_tokens": self._with_next(ids)}

    def get_pt_sample_gpt(self, data_key: str, idx: int) -> list[int]:
        """GPT tokens of a sample."""
        chunks = self._chunks(data_key)
        numbers = self._chunks_of(chunks, idx)
        rows = chunks.token_rows(int(numbers[0]), int(numbers[-1]) + 1)
        tokens: list[int] = rows.ravel().tolist()
        return tokens

    def get_pt_sample_text(self, data_key: str, idx: int) -> str:
        """The text of a sample."""
        return self.gpt_to_text(self.get_pt_sample_gpt(data_key, idx))

    def get_pt_neighbors_text(self, data_key: str, idx: int) -> list[list[list[str]]]:
        """For each chunk of a sample, and each neighbour that training takes: its text and that of
        its continuation."""
        numbers = self._chunks_of(self._chunks(data_key), idx)
        return [self._texts(row) for row in self._neighbors_of(data_key, numbers).tolist()]

    def get_neighbor_tokens(
        self, sample_id: int, chunk_id: int, data_key: str = "train"
    ) -> dict[str, Ints]:
        """`chunk_tokens`: (m,) of a chunk of a sample; `neighbor_tokens`: (k, r) of its neighbours
        and their continuations."""
        number = self._chunk(data_key, sample_id, chunk_id)
        return {
            "chunk_tokens": self._chunks(data_key).token_rows(number, number + 1)[0],
            "neighbor_tokens": self._with_next(self._neighbors_of(data_key, np.array([number])))[0],
        }

    def print_neighbor_texts(self, sample_id: int, chunk_id: int, data_key: str = "train") -> None:
        """Print a chunk of a sample, and its neighbours with distances and sources."""
        number = self._chunk(data_key, sample_id, chunk_id)
        print(f"chunk: {self.gpt_to_text(self._chunks(data_key).token_rows(number, number + 1))!r}")
        ids = self._neighbors_of(data_key, np.array([number]))[0]
        distances = self._neighbors(data_key).distances(number)
        for place, chunk in enumerate(ids.tolist()):
            if chunk == NO_CHUNK:
                print(f"neighbor {place}: none")
                continue
            dataset, document = self._database.rows(chunk)[:2].tolist()
            name = one_line(self._database.infos[dataset].prefix)
            text, after = self.get_db_chunk_and_continuation_text(chunk)
            print(
                f"neighbor {place}: chunk {chunk}, document {document} of {name}, squared distance "
                f"{distances[place]:.4g}\n  {text!r}\n  continues: {after!r}"
            )

    def print_usage(self) -> None:
        """Print the calls."""
        print(USAGE, end="")

    # --- parts ----------------------------------------------------------------------------------

    def _open_chunks(self, split: str) -> PretrainingChunks:
        if split not in SPLIT_NAMES:
            raise ConfigError(f"split {split!r}: {suggest(split, SPLIT_NAMES)}")
        config = self.project.config
        return PretrainingChunks.open(
            self.project.data(),
            split,
            seq_length=config.retro_gpt_seq_length,
            seed=config.retro_gpt_seed,
            sizes=config.sizes(),
            chunk_length=self._chunk_length,
        )

    def _open_neighbors(self, split: str) -> Neighbors:
        """The table of a split, refused if it is of other samples or another database."""
        chunks = self._chunks(split)
        table = Neighbors(self.project.neighbors(split))
        database = inputs.resolve("retro_db", (self.project.database,)).digest
        table.check(chunks.identity(), database)
        return table

    def _chunks_of(self, chunks: PretrainingChunks, sample: int) -> Ints:
        if not 0 <= sample < chunks.num_samples:
            raise IndexError(
                f"sample {sample} of {chunks.split}: there are {chunks.num_samples}, from 0"
            )
        return sample * chunks.chunks_per_sample + np.arange(chunks.chunks_per_sample)

    def _chunk(self, split: str, sample: int, chunk: int) -> int:
        numbers = self._chunks_of(self._chunks(split), sample)
        if not 0 <= chunk < len(numbers):
            raise IndexError(f"chunk {chunk} of a sample: there are {len(numbers)}, from 0")
        return int(numbers[chunk])

    def _neighbors_of(self, split: str, numbers: Ints) -> Ints:
        """(n, k) the neighbours that training takes."""
        table = self._neighbors(split)
        ids = table.rows(numbers)[:, : self.project.config.num_neighbors]
        self._database.check_neighbors(ids, table.url)
        return ids

    def _with_next(self, ids: Ints) -> Ints:
        """(..., 2 m) tokens of chunks and their continuations, padded with the end of document."""
        eod = self.gpt_tokenizer.eod
        both = (ids, self._database.continuations(ids))
        rows = [self._database.token_rows(one, self._chunk_length, eod) for one in both]
        return np.concatenate(rows, axis=-1)

    def _texts(self, ids: Sequence[int]) -> list[list[str]]:
        """Text and continuation of each chunk; two empty texts for none."""
        return [
            ["", ""] if chunk == NO_CHUNK else self.get_db_chunk_and_continuation_text(chunk)
            for chunk in ids
        ]


class OpenedRetro:
    """The methods of the project that `init` opened last, as Megatron-LM's tools have them."""

    def __init__(self) -> None:
        self._opened: Retro | None = None

    def init(self, project_dir: str) -> None:
        """Open a project."""
        self._opened = Retro.open(project_dir)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not hasattr(Retro, name):
            known = [method for method in vars(Retro) if not method.startswith("_")]
            raise AttributeError(f"retro has no {name!r}; {suggest(name, known)}")
        if self._opened is None:
            raise ConfigError(f"retro.{name}: no project is open; call retro.init(PROJECT) first")
        return getattr(self._opened, name)


retro = OpenedRetro()
