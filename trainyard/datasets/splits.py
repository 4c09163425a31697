"""Finds the documents of a split, and checks that they suffice for a sample. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from trainyard.artifacts.inputs import Manifests, check_exists
from trainyard.artifacts.urls import is_local
from trainyard.corpus.indexed import CacheOptions, IndexedDataset
from trainyard.corpus.outline import Outline, outline
from trainyard.datasets.config import DataConfig, Source
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.samples import count_tokens
from trainyard.datasets.token_rows import TokenSource
from trainyard.datasets.vocabulary import refuse_floats
from trainyard.errors import ArtifactError, ConfigError, DataError

OUTLINES_AT_ONCE = 16
"""Outlines read at once: each takes several requests to a store."""


MOST_SEQUENCES = 2**31
"""Sequences of a pair that ids of 32 bits can number."""


class TooLittleDataError(ConfigError):
    """A split of a source has less than one sample."""


def split_documents(num_documents: int, bounds: tuple[float, float]) -> range:
    """The ids of the documents between two fractions.

    Raises DataError for ids over 32 bits, the type in Megatron-LM's indices and ours."""
    first, last = _range(num_documents, bounds)
    if last > MOST_SEQUENCES:
        raise DataError(
            f"the split needs sequences {first} to {last - 1}, but sample indices number at most "
            f"{MOST_SEQUENCES} sequences of a pair, in 32 bits; divide the corpus into several "
            "pairs, and name all of them in --data-path"
        )
    return range(first, last)


def _range(num_documents: int, bounds: tuple[float, float]) -> tuple[int, int]:
    first, last = (round(bound * float(num_documents)) for bound in bounds)
    return first, last


def sources_of(data: DataConfig, split: str) -> list[Source]:
    """The sources of a split; ConfigError if there are none."""
    sources = data.sources(split)
    if not sources:
        raise ConfigError(
            f"--{split}-data-path is not given, but the run needs {split} samples; "
            "give it, or set --eval-iters 0"
        )
    return sources


def open_tokens(prefix: str, data: DataConfig, manifests: Manifests | None = None) -> TokenSource:
    """A token file with the reader that the options choose. manifests: as for `IndexedDataset`."""
    cache = cache_options(data)
    mapped = data.mmap_bin_files or not is_local(prefix)
    return IndexedDataset(prefix, "auto" if mapped else "file", cache, manifests)


def cache_options(data: DataConfig) -> CacheOptions:
    """Where and how much of remote files this node keeps."""
    size = data.object_storage_cache_size_mb << 20
    if data.object_storage_cache_path is None:
        return CacheOptions(max_bytes=size)
    return CacheOptions(Path(data.object_storage_cache_path), size)


def drops_last(data: DataConfig, split: str) -> bool:
    """Whether the tokens after the last whole sample are left out."""
    return split != "valid" or data.drop_last_partial_validation_sequence


def _least_tokens(data: DataConfig, sample_format: SampleFormat, split: str) -> int:
    return (
        sample_format.text_length if drops_last(data, split) else 1 + int(sample_format.extra_token)
    )


def documents_of_split(
    file: TokenSource, data: DataConfig, sample_format: SampleFormat, split: str
) -> range:
    """The ids of a split's documents. Raises TooLittleDataError if they are less than a sample."""
    try:
        documents = split_documents(len(file), data.fractions(split))
    except DataError as error:
        raise DataError(f"{file.prefix}: {error}") from error
    where = f"{file.prefix}: the {split} split"
    if not len(documents):
        raise TooLittleDataError(
            f"{where} ({data.divided_by(split)}) has none of the {len(file)} documents; "
            "give it a larger part, or add documents"
        )
    num_tokens = tokens_of(file, documents)
    if num_tokens < _least_tokens(data, sample_format, split):
        raise TooLittleDataError(
            f"{where} has {num_tokens} tokens in {len(documents)} documents, less than one "
            f"sample of --seq-length {sample_format.seq_length} plus one token; shorten "
            f"that, enlarge the split ({data.divided_by(split)}), or add documents"
        )
    return documents


def tokens_of(file: TokenSource, documents: range) -> int:
    """Tokens of the documents of a file; remembered for a version of the file."""
    if not isinstance(file, IndexedDataset):
        return count_tokens(file.sequence_lengths, documents)
    what = f"tokens {documents.start} {documents.stop}"
    count = partial(count_tokens, file.sequence_lengths, documents)
    return int(str(file.remember(what, count)))


def sentence_documents_of_split(file: IndexedDataset, data: DataConfig, split: str) -> range:
    """The documents of a split of a file whose sequences are sentences. Raises TooLittleDataError
    for none."""
    num_documents = len(file.document_indices) - 1
    documents = range(*_range(num_documents, data.fractions(split)))
    if not documents:
        raise TooLittleDataError(
            f"{file.prefix}: the {split} split ({data.divided_by(split)}) has none of the "
            f"{num_documents} documents; give it a larger part, or add documents"
        )
    return documents


def lines_of_split(file: ConversationFile, data: DataConfig, split: str) -> range:
    """The records of a split of a file of instruction data. Raises TooLittleDataError for none."""
    lines = range(*_range(len(file), data.fractions(split)))
    if not lines:
        raise TooLittleDataError(
            f"{file.url}: the {split} split ({data.divided_by(split)}) has none of the {len(file)} "
            "records; give it a larger part, or a file of its own (--valid-data-path)"
        )
    return lines


def check_instructions(data: DataConfig, splits: Sequence[str]) -> None:
    """Raise the errors that the instruction data of a run would raise, from the first record of
    each split of each file. A remote file must exist."""
    data = data.expanded()
    for split in splits:
        if split == "test" and not _is_tested(data):
            continue
        for source in sources_of(data, split):
            if not is_local(source.prefix):
                check_exists(source.prefix)
                continue
            file = ConversationFile(source.prefix)
            try:
                _ = file[lines_of_split(file, data, split)[0]]
            except TooLittleDataError:
                if split != "test" or not data.data_path:  # a run needs no test data
                    raise


# --- before anything is loaded ------------------------------------------------------------------


def check_splits(data: DataConfig, seq_length: int | None, splits: Sequence[str]) -> None:
    """Raise the errors that the datasets of a run would raise, from a few hundred bytes per pair.

    A pair that may be wrong is opened, which raises its error. seq_length: None for samples of
    sentences, for which any number of tokens is enough."""
    data = data.expanded()
    if data.mock_data:
        return
    sample_format = SampleFormat(seq_length or 1, seed=0, vocab_size=0, eod=0)
    given = [split for split in splits if split != "test" or _is_tested(data)]
    sources = {split: [source.prefix for source in sources_of(data, split)] for split in given}
    prefixes = list(dict.fromkeys(prefix for named in sources.values() for prefix in named))
    look = partial(_outline, manifests=Manifests())
    with ThreadPoolExecutor(OUTLINES_AT_ONCE, thread_name_prefix="outline") as pool:
        outlines = dict(zip(prefixes, pool.map(look, prefixes), strict=True))
    for split, named in sources.items():
        for prefix in named:
            if not _is_enough(outlines[prefix], data, sample_format, split):
                _refuse(prefix, data, sample_format, split)


def _is_tested(data: DataConfig) -> bool:
    begin, end = data.fractions("test")
    return begin != end and bool(data.sources("test"))


def _outline(prefix: str, manifests: Manifests) -> Outline | None:
    """The outline of a pair; None if the pair is damaged or stores floats."""
    try:
        found = outline(prefix, manifests)
    except ArtifactError:
        return None
    return found if found.is_whole and found.dtype.kind != "f" else None


def _is_enough(
    found: Outline | None, data: DataConfig, sample_format: SampleFormat, split: str
) -> bool:
    if found is None:
        return False
    first, last = _range(found.num_sequences, data.fractions(split))
    return first < last and found.count_tokens(first, last) >= _least_tokens(
        data, sample_format, split
    )


def _refuse(prefix: str, data: DataConfig, sample_format: SampleFormat, split: str) -> None:
    file = open_tokens(prefix, data)
    refuse_floats(file)
    try:
        documents_of_split(file, data, sample_format, split)
    except TooLittleDataError:
        if split != "test" or not data.data_path:  # a run needs no test data
            raise
