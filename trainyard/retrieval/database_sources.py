"""Which datasets of a chunk database were cut from given token files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trainyard.artifacts import inputs, store
from trainyard.artifacts.manifest import InputRecord, Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename
from trainyard.corpus.indexed import read_index
from trainyard.errors import ConfigError
from trainyard.retrieval.dataset_infos import DatasetInfo, read_infos
from trainyard.retrieval.dataset_names import has_name
from trainyard.retrieval.token_files import pair_digest

_INPUT = re.compile(r"data_([0-9]{1,6}) \((?:weight [^, ]{1,40}, )?name (.*)\)\Z")


def find_datasets(database_url: str, prefixes: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs (place among `prefixes`, dataset of the database) with the same documents.

    Token files are recognised by their digest; in a database whose manifest lists none, by name and
    number of documents. Raises ConfigError for files that have the name of a dataset and other
    contents: their documents have other numbers, so none could be told from a neighbour."""
    infos = read_infos(database_url)
    records = _records(database_url, infos)
    found = []
    for place, prefix in enumerate(prefixes):
        for number, info in enumerate(infos):
            if number in records:
                same = _is_recorded(prefix, records[number])
            else:
                same = has_name(prefix, info.prefix) and _documents(prefix) == info.n_docs
            if same:
                found.append((place, number))
            elif has_name(prefix, info.prefix):
                raise ConfigError(
                    f"{prefix} is not what {database_url} was cut from, though dataset {number} "
                    f"there has its name, {info.prefix}; build the database again, or rename the "
                    "token files"
                )
    return found


def prefixes_of_all(
    database_url: str, prefixes: Sequence[str], found: Sequence[tuple[int, int]]
) -> list[str] | None:
    """The token files of all datasets of the database in its order; None if some are not among
    `prefixes`."""
    by_number = {number: prefixes[place] for place, number in found}
    numbers = range(len(read_infos(database_url)))
    return [by_number[n] for n in numbers] if all(n in by_number for n in numbers) else None


def database_manifest(database_url: str) -> Manifest | None:
    """The manifest of a database; None for one of another program."""
    found = read_manifest(store.join(database_url, MANIFEST))
    return None if found is None else found[0]


def _records(database_url: str, infos: Sequence[DatasetInfo]) -> Mapping[int, InputRecord]:
    """The token files of each dataset as the stage that cut them found them."""
    manifest = database_manifest(database_url)
    records = {}
    for name, record in ({} if manifest is None else manifest.inputs).items():
        match = _INPUT.match(name)
        if match and int(match[1]) < len(infos) and infos[int(match[1])].prefix == match[2]:
            records[int(match[1])] = record
    return records


def _is_recorded(prefix: str, record: InputRecord) -> bool:
    """Whether these are the recorded files, or copies of them under any name."""
    # A pair has the digest of its artifact, or one with the names of its files.
    return record.digest in (
        inputs.resolve(prefix, (prefix,)).digest,
        pair_digest(prefix),
        *(pair_digest(prefix, basename(url)) for url in record.urls),
    )


def _documents(prefix: str) -> int:
    return len(read_index(prefix).document_indices) - 1
