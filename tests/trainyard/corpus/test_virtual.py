"""Virtual datasets: what is read is what the merged pair has, in any store."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.merge.config import MergeConfig
from stages.merge.run import run
from tests.stages.directly import run_directly
from tests.trainyard.corpus.token_files import write_tokens
from trainyard.artifacts import store
from trainyard.artifacts.inputs import Manifests, read_digest
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.artifacts.parts_list import read_parts
from trainyard.corpus import virtual_reader
from trainyard.corpus.indexed import CacheOptions, IndexedDataset, read_index
from trainyard.corpus.outline import outline
from trainyard.corpus.virtual import find_virtual
from trainyard.errors import ArtifactError, ConfigError

PARTS: Any = (
    [[[1, 2, 3]], [], [[4], [5]]],
    [],
    [[[6, 7]], [[]]],
    [[[8, 9, 10, 11], [12]]],
)


def put_parts(folder: str) -> list[str]:
    return [
        write_tokens(store.join(folder, f"p{n}_text_document"), docs)
        for n, docs in enumerate(PARTS)
    ]


def merge(output_prefix: str, *entries: str, **options: Any) -> dict[str, Any]:
    options |= {"input": list(entries), "output_prefix": output_prefix}
    return run_directly(MergeConfig, run, **options)


def contents(dataset: IndexedDataset) -> list[Any]:
    arrays = (dataset.sequence_lengths, dataset.sequence_offsets, dataset.document_indices)
    documents = [[s.tolist() for s in document] for document in dataset.documents()]
    return [dataset.dtype, dataset.num_tokens, *(a.tolist() for a in arrays), documents]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("is_folder", "max_open"), [(False, 1), (False, 256), (True, 256)])
def test_a_virtual_dataset_reads_as_the_merged_pair(
    store_url: str, monkeypatch: pytest.MonkeyPatch, is_folder: bool, max_open: int
) -> None:
    monkeypatch.setattr(virtual_reader, "MAX_OPEN", max_open)
    parts, merged = (store.join(store_url, name) for name in ("parts", "out/merged"))
    put_parts(parts)
    virtual = parts if is_folder else store.join(store_url, "elsewhere/virtual")
    metrics = merge(merged, parts)
    assert is_folder or merge(virtual, parts, virtual=True) == metrics
    found, whole = IndexedDataset(virtual), IndexedDataset(merged)
    assert contents(found) == contents(whole)
    for first in range(0, whole.num_tokens, 2):
        for last in range(first, whole.num_tokens + 1, 3):
            assert found.get_flat(first, last).tolist() == whole.get_flat(first, last).tolist()
    assert contents(pickle.loads(pickle.dumps(found))) == contents(whole)
    look, expected = outline(virtual), outline(merged)
    assert look.is_whole
    assert look.num_sequences == expected.num_sequences
    assert look.count_tokens(1, 5) == expected.count_tokens(1, 5)


def test_a_virtual_dataset_copies_no_token_and_moves_with_its_parts(tmp_path: Path) -> None:
    put_parts(str(tmp_path / "yard/parts"))
    merge(str(tmp_path / "yard/v/all"), str(tmp_path / "yard/parts"), virtual=True)
    assert {path.name for path in (tmp_path / "yard/v").iterdir()} == {"all.parts"}
    (tmp_path / "yard").rename(tmp_path / "moved")
    assert len(IndexedDataset(str(tmp_path / "moved/v/all"))) == 7


def test_a_virtual_dataset_is_merged_as_its_parts_are(tmp_path: Path) -> None:
    parts = put_parts(str(tmp_path / "parts"))
    first, both, real = (str(tmp_path / name) for name in ("first", "both", "real"))
    merge(first, *parts[:2], virtual=True)
    merge(both, first, *parts[2:], virtual=True)
    merge(real, both + ".parts")
    merge(str(tmp_path / "plain"), str(tmp_path / "parts"))
    for ending in (".bin", ".idx"):
        assert read_digest(real + ending) == read_digest(str(tmp_path / "plain") + ending)
    with pytest.raises(ConfigError, match=r"p0_text_document twice"):
        merge(str(tmp_path / "twice"), both, parts[0], virtual=True)


def listed(prefix: str) -> None:
    """Publish a manifest of a pair, as the stage that made it does."""
    records = [
        store.FileRecord(e, store.info(prefix + e).size_bytes, read_digest(prefix + e))
        for e in (".bin", ".idx")
    ]
    publish(f"{prefix}.manifest.json", Manifest(stage="tokenize", files=tuple(records)), None)


def made_again(prefix: str) -> None:
    write_tokens(prefix, [[[21, 22, 23]], [], [[24], [25]]])
    store.delete(f"{prefix}.manifest.json")
    listed(prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: store.delete(part + ".bin"), r"p0_text_document\.bin is missing; restore"),
        (lambda part: store.write_bytes(part + ".bin", b"12"), "is 2 bytes, not 10; restore it"),
        (lambda part: write_tokens(part, [[[1, 2]], [], [[3, 4, 5]]]), r"\.idx was changed since"),
        (made_again, r"p0_text_document\.bin was changed since; .* --virtual again"),
    ],
)
def test_a_part_that_changed_is_refused_by_name(
    tmp_path: Path, change: Callable[[str], object], message: str
) -> None:
    part = put_parts(str(tmp_path / "parts"))[0]
    listed(part)
    virtual = str(tmp_path / "all")
    merge(virtual, str(tmp_path / "parts"), virtual=True)
    store.delete(f"{part}.manifest.json")
    change(part)
    with pytest.raises(ArtifactError, match=message):
        IndexedDataset(virtual).get(0)


def put_changed_list(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a virtual dataset `all` whose list was changed by hand."""
    put_parts(str(folder / "parts"))
    merge(str(folder / "all"), str(folder / "parts"), virtual=True)
    document = json.loads((folder / "all.parts").read_text())
    change(document)
    (folder / "all.parts").write_text(json.dumps(document))


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["parts"][0].update(prefix=name)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(dtype=7),
        lambda document: document.update(parts=[]),
        lambda document: document.update(parts=[1]),
        lambda document: document.update(provenance="yes"),
        lambda document: document["parts"][0].update(size_bytes=-2),
        lambda document: document["parts"][0].update(bin_digest=""),
        lambda document: document["parts"][0].update(more=1),
        renamed("http://example.org/a"),
        renamed("a\0b"),
    ],
)
def test_what_is_no_list_of_parts_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    put_changed_list(tmp_path, change)
    with pytest.raises(ArtifactError, match=r"all\.parts: not the parts of a virtual dataset"):
        IndexedDataset(str(tmp_path / "all"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(dtype="object"), "type 'object'; known are uint8, int8"),
        (lambda document: document["parts"][0].update(size_bytes=11), "no whole tokens of uint16"),
        (lambda document: document.update(format_version=2), "format 2 is newer than 1"),
    ],
)
def test_a_list_of_what_is_not_known_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    put_changed_list(tmp_path, change)
    with pytest.raises(ArtifactError, match=message):
        IndexedDataset(str(tmp_path / "all"))


@pytest.mark.slow
def test_an_index_in_an_object_store_names_no_path_of_a_machine(s3_url: str) -> None:
    put_parts(store.join(s3_url, "parts"))
    url = store.join(s3_url, "v/all")
    merge(url, store.join(s3_url, "parts"), virtual=True)
    document = store.read_json(url + ".parts")
    for name in ("/etc/passwd", "file:///etc/passwd"):
        renamed(name)(document)
        store.write_bytes(url + ".parts", json.dumps(document).encode())
        with pytest.raises(ArtifactError, match="a path of a machine"):
            IndexedDataset(url)
    renamed("../../../../parts/p0_text_document")(document)
    store.write_bytes(url + ".parts", json.dumps(document).encode())
    bucket = "/".join(s3_url.split("/")[:3])
    assert read_parts(url + ".parts").parts[0].prefix == f"{bucket}/parts/p0_text_document"


def test_a_folder_with_anything_but_pairs_is_no_dataset(tmp_path: Path) -> None:
    put_parts(str(tmp_path / "parts"))
    (tmp_path / "parts/notes.txt").write_text("x")
    with pytest.raises(ArtifactError, match=r"notes\.txt is not half of a \.bin/\.idx pair"):
        IndexedDataset(str(tmp_path / "parts"))
    assert find_virtual(str(tmp_path / "nowhere"), Manifests()) is None


def test_types_that_differ_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    put_parts(str(tmp_path / "parts"))
    write_tokens(tmp_path / "parts/wide", [[[1]]], np.int32)
    with pytest.raises(ArtifactError, match=r"wide stores int32, but .* stores uint16"):
        merge(str(tmp_path / "all"), str(tmp_path / "parts"), virtual=True)
    assert not (tmp_path / "all.parts").exists()


def test_a_folder_that_takes_no_index_is_named(tmp_path: Path) -> None:
    put_parts(str(tmp_path / "parts"))
    (tmp_path / "cache").write_text("a file")
    options = CacheOptions(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"cannot be written there .* TRAINYARD_CACHE"):
        read_index(str(tmp_path / "parts"), options)


@pytest.mark.parametrize(
    ("limit", "most"), [(resource.RLIM_INFINITY, 1 << 14), (1 << 20, 1 << 14), (1024, 256), (3, 1)]
)
def test_open_parts_leave_files_to_others(limit: int, most: int) -> None:
    assert virtual_reader.most_open(limit) == most
