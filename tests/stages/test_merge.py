"""The merge stage: folders, patterns and lists of pairs to one pair."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.merge.config import MergeConfig
from stages.merge.run import run
from tests.stages.directly import run_directly, run_program
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_digest
from trainyard.artifacts.manifest import FileRecord, Manifest, publish, read_manifest
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.corpus.provenance.origins import Provenance, ProvenanceWriter
from trainyard.errors import ArtifactError, ConfigError, DataError

FIRST: Any = [[[1, 2, 3]], [], [[4], [5]]]
SECOND: Any = [[[6, 7]]]


def put(prefix: str, docs: Any, dtype: str = "uint16", multimodal: bool = False) -> None:
    with store.open_output(prefix + ".bin") as bin_file, store.open_output(prefix + ".idx") as idx:
        writer = IndexedWriter(bin_file, dtype, multimodal)
        for doc in docs:
            writer.add_document(doc)
        writer.write_index(idx)


def put_docs(prefix: str, docs: Any, bucket: str = "s3://b") -> None:
    writer = ProvenanceWriter()
    for k in range(len(docs)):
        writer.add(f"{bucket}/{store.basename(prefix)}.jsonl", 10 * k, 9, k + 1, f"id {k}")
    with store.open_output(prefix + ".docs") as out:
        writer.write(out)


def tokens(prefix: str) -> Any:
    return [[s.tolist() for s in doc] for doc in IndexedDataset(prefix).documents()]


def merge(output_prefix: str, *entries: str, **options: Any) -> dict[str, Any]:
    options |= {"input": list(entries), "output_prefix": output_prefix}
    return run_directly(MergeConfig, run, **options)


@pytest.mark.few_cases(1)
def test_pairs_become_one_in_the_order_of_their_names(store_url: str) -> None:
    put(store.join(store_url, "parts/b"), SECOND)
    put(store.join(store_url, "parts/a"), FIRST)
    store.write_bytes(store.join(store_url, "parts/a.claim.json"), b"{}")
    store.write_bytes(store.join(store_url, "parts/a.bad_lines.jsonl"), b"{}\n")
    prefix = store.join(store_url, "whole")
    metrics = merge(prefix, store.join(store_url, "parts"))
    assert tokens(prefix) == FIRST + SECOND
    assert metrics == {"pairs": 2, "documents": 4, "sequences": 4, "tokens": 7}
    assert not store.exists(prefix + ".docs")


def test_the_vocabulary_size_of_the_parts_stays_known(tmp_path: Path) -> None:
    part = f"{tmp_path}/parts/a"
    put(part, FIRST)
    files = [
        FileRecord(ending, store.info(part + ending).size_bytes, read_digest(part + ending))
        for ending in (".bin", ".idx")
    ]
    manifest = Manifest(stage="tokenize", files=tuple(files), metrics={"vocab_size": 300})
    publish(f"{part}.manifest.json", manifest, None)
    merged = merge(f"{tmp_path}/whole", f"{tmp_path}/parts")
    assert merged["vocab_size"] == 300


@pytest.mark.slow
def test_patterns_prefixes_and_files_name_pairs(store_url: str) -> None:
    a, b, c = (store.join(store_url, "parts", name) for name in ("a", "b", "c"))
    for prefix, docs in ((a, FIRST), (b, SECOND), (c, FIRST)):
        put(prefix, docs)
    put_docs(a, FIRST)
    whole = store.join(store_url, "whole")
    merge(whole, c, store.join(store_url, "parts", "[ab]"), drop_provenance=True)
    assert tokens(whole) == FIRST + FIRST + SECOND
    merge(whole, b + ".bin", b + ".idx", b + ".manifest.json", c + ".idx")
    assert tokens(whole) == SECOND + FIRST
    merge(whole, store.join(store_url, "parts", "*.bin"), drop_provenance=True)
    assert tokens(whole) == FIRST + SECOND + FIRST
    with pytest.raises(ArtifactError, match="no file matches"):
        merge(whole, store.join(store_url, "parts", "d*"))


def test_pairs_without_a_token_are_refused(store_url: str) -> None:
    put(store.join(store_url, "parts/a"), [[], []])
    put(store.join(store_url, "parts/b"), [])
    whole = store.join(store_url, "whole")
    with pytest.raises(DataError, match=r"--input .*: no token in any of 2 pairs"):
        merge(whole, store.join(store_url, "parts"))
    assert not store.exists(whole + ".bin")


@pytest.mark.slow
def test_provenance_is_kept(store_url: str) -> None:
    for name, docs in (("a", FIRST), ("b", SECOND)):
        prefix = store.join(store_url, "parts", name)
        put(prefix, docs)
        put_docs(prefix, docs)
    whole = store.join(store_url, "whole")
    for entries in (["parts"], ["parts/a", "parts/b"], ["parts/?"]):
        merge(whole, *(store.join(store_url, entry) for entry in entries))
        origins = Provenance(whole + ".docs")
        assert [origins[k].source for k in (0, 3)] == ["s3://b/a.jsonl", "s3://b/b.jsonl"]
        assert (len(origins), origins[2].id) == (4, "id 2")


def test_merge_of_merges_keeps_provenance_outside_the_digest(tmp_path: Path) -> None:
    put(str(tmp_path / "parts" / "a"), FIRST)
    digests = set()
    for bucket in ("s3://b", "/data"):
        put_docs(str(tmp_path / "parts" / "a"), FIRST, bucket)
        whole, again = str(tmp_path / "whole"), str(tmp_path / bucket[-1] / "again")
        for output_prefix, entry in ((whole, str(tmp_path / "parts")), (again, whole)):
            run_program(
                "stages.merge", "--input", entry, "--output-prefix", output_prefix, expect=0
            )
        found = read_manifest(f"{again}.manifest.json")
        assert found is not None
        digests.add(found[0].output_digest)
        assert Provenance(again + ".docs")[0].source == f"{bucket}/a.jsonl"
    assert len(digests) == 1


def test_provenance_of_some_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    for name in "ab":
        put(str(tmp_path / "parts" / name), FIRST)
    put_docs(str(tmp_path / "parts" / "b"), FIRST)
    whole = str(tmp_path / "out" / "whole")
    with pytest.raises(ConfigError, match=r"b has a \.docs .*a has none.*--drop-provenance"):
        merge(whole, str(tmp_path / "parts"))
    assert not (tmp_path / "out").exists()
    merge(whole, str(tmp_path / "parts"), drop_provenance=True)
    assert not Path(whole + ".docs").exists()
    assert tokens(whole) == FIRST + FIRST


def test_multimodal_pairs_merge_when_they_are_meant_to(tmp_path: Path) -> None:
    for name in "ab":
        put(str(tmp_path / "parts" / name), FIRST, multimodal=True)
    whole = str(tmp_path / "whole")
    with pytest.raises(ArtifactError, match="merge it with --multimodal"):
        merge(whole, str(tmp_path / "parts"))
    merge(whole, str(tmp_path / "parts"), multimodal=True)
    modes = IndexedDataset(whole).modes
    assert modes is not None
    assert modes.tolist() == [0] * 6


def broken_bin(folder: Path) -> None:
    (folder / "b.bin").write_bytes(b"")


def half(folder: Path) -> None:
    (folder / "b.idx").unlink()


def stray(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")


def other_type(folder: Path) -> None:
    put(str(folder / "b"), SECOND, "int32")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (broken_bin, r"b\.bin is 0 bytes, but by .*b\.idx it has 4"),
        (half, r"b\.bin has no b\.idx beside it"),
        (stray, r"notes\.txt is not half of a"),
        (other_type, r"b stores int32, .*a stores uint16"),
    ],
)
def test_nothing_is_written_when_a_pair_is_wrong(fault: Any, message: str, tmp_path: Path) -> None:
    put(str(tmp_path / "parts/a"), FIRST)
    put(str(tmp_path / "parts/b"), SECOND)
    fault(tmp_path / "parts")
    with pytest.raises(ArtifactError, match=message):
        merge(str(tmp_path / "out/p"), str(tmp_path / "parts"))
    assert not (tmp_path / "out").exists()


def test_output_among_inputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for entries, output in (
        (["d/"], "d/whole"),
        (["e", "./d"], "d/whole"),
        (["d/*"], "d/whole"),
        (["d/whole"], "d/whole"),
        (["s3://b/d"], "s3://b/d/whole"),
        (["."], "whole"),
    ):
        with pytest.raises(ConfigError, match=rf"--output-prefix {output} is in the --input"):
            MergeConfig(input=tuple(entries), output_prefix=output)
    with pytest.raises(ConfigError, match="--input names no pair"):
        MergeConfig(input=("a.manifest.json",), output_prefix="e/whole")
    MergeConfig(input=("d/part-*", "d/x"), output_prefix="d/whole")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    put(str(tmp_path / "parts/a"), FIRST)
    base = [sys.executable, "-m", "stages.merge", "--input", str(tmp_path / "parts")]
    command = [*base, "--output-prefix", str(tmp_path / "whole")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["parts", *(f"whole.{end}" for end in ("bin", "idx", "manifest.json", "sums"))]


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("given", ["{}", "{}.idx", "{}.bin"])
def test_file_that_links_to_itself_is_refused(tmp_path: Path, ending: str, given: str) -> None:
    put(str(tmp_path / "in/a"), FIRST)
    (tmp_path / f"in/a{ending}").unlink()
    (tmp_path / f"in/a{ending}").symlink_to(f"a{ending}")
    (tmp_path / "in/a.manifest.json").unlink(missing_ok=True)
    inputs = given.format(tmp_path / "in/a")
    done = run_program(
        "stages.merge", "--input", inputs, "--output-prefix", str(tmp_path / "whole"), expect=1
    )
    assert f"a{ending}" in done.err


def test_a_virtual_merge_runs_again_when_its_parts_moved_and_verifies_them(tmp_path: Path) -> None:
    put(str(tmp_path / "parts/a"), FIRST)
    put(str(tmp_path / "parts/b"), SECOND)
    whole = str(tmp_path / "out/whole")

    def again(entry: str) -> str:
        words = ("--input", str(tmp_path / entry), "--output-prefix", whole, "--virtual")
        return run_program("stages.merge", *words, expect=0).err

    again("parts")
    assert "running because" not in again("parts")
    (tmp_path / "parts").rename(tmp_path / "moved")
    assert re.search(r"running because the input moved \(.*parts -> .*moved\)", again("moved"))
    assert tokens(whole) == FIRST + SECOND
    run_program("stages.verify", whole, expect=0)
    path = tmp_path / "moved/b.bin"
    path.write_bytes(path.read_bytes()[::-1])
    message = run_program("stages.verify", whole, expect=1).err
    assert re.search(r"b\.bin: expected digest .*; a part of .*whole\.parts", message)
    path.unlink()
    message = run_program("stages.verify", whole, expect=1).err
    assert re.search(r"b\.bin: missing; a part of .*whole\.parts", message)


def test_a_merge_may_take_the_place_of_a_virtual_one_and_back(tmp_path: Path) -> None:
    put(str(tmp_path / "parts/a"), FIRST)
    whole = str(tmp_path / "out/whole")
    words = ("--input", str(tmp_path / "parts"), "--output-prefix", whole)
    for flags, endings in (((), {"bin", "idx", "sums"}), (("--virtual",), {"parts"})) * 2:
        run_program("stages.merge", *words, *flags, expect=0)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {f"whole.{ending}" for ending in (*endings, "manifest.json")}
        assert tokens(whole) == FIRST
