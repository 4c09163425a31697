"""Work grows in proportion to its size: writes, listings and calls are counted at two sizes.

Counts are the same on any machine, unlike times; a square that comes back fails here. For times and
memory: `benchmarks.growth`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flows.gc.sweep import sweep
from flows.recipes.recipe import read_recipe
from flows.recipes.refresh import plan_refresh
from stages.report.lineage import Artifact, Edge, grouped
from stages.runtime.context import WorkFolder
from stages.runtime.up_to_date import decide
from stages.tokenize.config import TokenizeConfig
from tests.counts import LINEAR, TIMES, calls, grow
from tests.flows.gc.yards import AT_ONCE, Corpus
from tests.trainyard.corpus.token_files import write_tokens
from trainyard.artifacts import store
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.block_digest import BLOCK_BYTES, num_blocks
from trainyard.artifacts.inputs import MAX_ASKED, Manifests, resolve
from trainyard.artifacts.lines import file_record
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.conversion.huggingface.config_read import read_config
from trainyard.conversion.huggingface.read import class_tensors, open_huggingface
from trainyard.corpus.merge import survey
from trainyard.corpus.unit_sizes import (
    MAX_UNITS,
    MOST_BYTES_OF_RANKS,
    UNIT_BYTES,
    UNITS_A_RANK,
    unit_bytes_for,
)
from trainyard.corpus.units import InputFile, plan_pieces, plan_units, share_of
from trainyard.tokenizers.config import TokenizerConfig


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def operations() -> Iterator[Counter[str]]:
    """Counts the operations of stores, by kind."""
    counts: Counter[str] = Counter()

    def count(operation: str, url: str) -> None:
        counts[operation] += 1

    store.observers.append(count)
    try:
        yield counts
    finally:
        store.observers.remove(count)


def test_the_names_of_outputs_are_written_once_each(tmp_path: Path) -> None:
    def bytes_written(count: int) -> int:
        output = Output.directory(str(tmp_path / f"out-{count}"))
        work = WorkFolder(output, "key-of-a-run")
        before = _bytes_given_to_files()
        for number in range(count):
            work.record_final([f"file-{number:04d}.npy"])
        after = _bytes_given_to_files()
        assert len(work.final_names()) == count
        return after - before

    assert grow(bytes_written, 20) <= LINEAR


def _bytes_given_to_files() -> int:
    """By this process, so far; whether they are written over later makes no difference."""
    text = Path("/proc/self/io").read_text()
    return int(text.partition("wchar: ")[2].split()[0])


class ManyInputs:
    """A stage with an input for each pair of a folder."""

    def __init__(self, prefixes: list[str]) -> None:
        self._prefixes = prefixes

    def inputs(self) -> dict[str, tuple[str, ...]]:
        return {f"data_path_{n}": (prefix,) for n, prefix in enumerate(self._prefixes)}

    def output(self) -> Output | None:
        return None


def test_a_decision_lists_a_folder_of_inputs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.runtime.up_to_date.digest_relevant", lambda config: {})

    def counted(count: int) -> Counter[str]:
        folder = tmp_path / f"pairs-{count}"
        folder.mkdir()
        pairs = [write_tokens(folder / f"p{n:03d}", [[[1, 2]]]) for n in range(count)]
        with operations() as found:
            decide("index", ManyInputs(pairs), ("stages.index.run",), False)
        return found

    few, many = counted(10), counted(10 * TIMES)
    assert few["list"] == many["list"] == 1
    assert many.total() <= LINEAR * few.total()


def write_llama(folder: Path, num_layers: int) -> None:
    """A Llama in two files with their index."""
    document = {
        "model_type": "llama",
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 1,
        "vocab_size": 4,
    }
    (folder / "config.json").write_text(json.dumps(document))
    shapes = class_tensors(*read_config(document, "config.json"))
    files = {name: f"{number % 2}.safetensors" for number, name in enumerate(shapes)}
    for file in set(files.values()):
        tensors = {name: torch.zeros(shapes[name]) for name in shapes if files[name] == file}
        save_file(tensors, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))


@pytest.mark.slow
def test_a_hugging_face_folder_is_opened_in_steps_proportional_to_its_tensors(
    tmp_path: Path,
) -> None:
    def counted(num_layers: int) -> int:
        folder = tmp_path / f"llama-{num_layers}"
        folder.mkdir()
        write_llama(folder, num_layers)
        return calls(lambda: open_huggingface(str(folder)).close())

    counted(1)  # torch imports what converts shapes
    assert grow(counted, 10) <= LINEAR


@pytest.mark.slow
def test_the_inputs_of_a_merge_cost_a_request_a_pair(tmp_path: Path) -> None:
    """Each pair costs a request for its manifest."""

    def counted(count: int) -> Counter[str]:
        folder = tmp_path / f"parts-{count}"
        folder.mkdir()
        pairs = [write_tokens(folder / f"p{n:03d}", [[[1, 2]]]) for n in range(count)]
        for pair in pairs:
            files = tuple(file_record(pair + end, end) for end in (".bin", ".idx"))
            publish(f"{pair}.manifest.json", Manifest(stage="tokenize", files=files), None)
        with operations() as found:
            resolve("input", pairs)
        return found

    few, many = counted(20), counted(20 * TIMES)
    assert few["list"] == many["list"] == 1
    assert few["stat"] == many["stat"] <= MAX_ASKED
    assert many["read"] == 20 * TIMES


@pytest.mark.slow
@pytest.mark.s3
def test_a_merge_in_an_object_store_asks_once_for_a_pair_and_reads_its_index(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request for the size and version of a file: listings of the folder have them."""
    asked: Counter[str] = Counter()
    call = S3Backend.call

    def counted(self: S3Backend, method: str, **arguments: Any) -> Any:
        asked[method] += 1
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", counted)

    def requests(count: int) -> Counter[str]:
        folder = join(s3_url, f"parts-{count}")
        pairs = [join(folder, f"p{number:03d}") for number in range(count)]
        local = Path(write_tokens(tmp_path / "p", [[[1, 2]]]))
        for pair in pairs:
            for end in (".bin", ".idx"):
                store.write_bytes(pair + end, Path(f"{local}{end}").read_bytes())
            files = tuple(file_record(pair + end, end) for end in (".bin", ".idx"))
            publish(f"{pair}.manifest.json", Manifest(stage="tokenize", files=files), None)
        asked.clear()
        manifests = Manifests()
        resolve("input", pairs, manifests)
        survey(pairs, tmp_path / str(count), manifests=manifests)
        return Counter(asked)

    few, many = requests(5), requests(5 * TIMES)
    more = many - few
    assert more["get_object"] <= 2 * 5 * (TIMES - 1), "a manifest and an index, each once"
    assert more.keys() <= {"get_object", "head_object"}
    assert more["head_object"] <= MAX_ASKED


def test_a_finished_file_is_found_without_a_look_at_its_neighbours(tmp_path: Path) -> None:
    """What one of many files costs in a job of many runs, in a folder of all of them."""

    def counted(count: int) -> Counter[str]:
        folder = tmp_path / f"files-{count}"
        folder.mkdir()
        for number in range(count):
            (folder / f"{number:03d}.jsonl").write_text('{"text": "1"}\n')
        config = TokenizeConfig(
            input=(str(folder / "000.jsonl"),),
            output_prefix=str(tmp_path / "parts" / "000"),
            tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9),
        )
        with operations() as found:
            assert decide("tokenize", config, ("stages.tokenize.run",), False).reason
        return found

    few, many = counted(10), counted(10 * TIMES)
    assert few == many
    assert many["list"] == 0


@pytest.mark.slow
def test_units_of_shares_grow_in_number_with_the_ranks_and_not_beyond_a_bound() -> None:
    tb = 10**12
    assert unit_bytes_for(tb, world_size=10_000) == UNIT_BYTES
    assert unit_bytes_for(10 * tb, world_size=10) == MOST_BYTES_OF_RANKS
    assert unit_bytes_for(10 * tb) > MOST_BYTES_OF_RANKS

    def least(num_ranks: int) -> int:
        files = [InputFile("a.jsonl", UNITS_A_RANK * UNIT_BYTES * num_ranks)]
        planned = plan_units(files, world_size=num_ranks)
        return min(len(share_of(planned, rank, num_ranks)) for rank in (0, 1, num_ranks - 1))

    assert least(50) == least(50 * TIMES) == UNITS_A_RANK


@pytest.mark.slow
def test_each_of_many_shares_has_pieces_of_the_same_units() -> None:
    units = plan_units([InputFile("a.jsonl", 10**11), InputFile("b.jsonl.gz", 10**9)])
    pieces = plan_pieces(units, 1000)
    assert len(units) <= MAX_UNITS + 1
    ranges = [source for own in pieces for piece in own for source in piece.sources]
    assert [one.start for one in ranges[1:-1]] == [one.end for one in ranges[:-2]]
    assert all(one.start % BLOCK_BYTES == 0 for one in ranges)
    together = list(chain.from_iterable(pieces))
    assert max(piece.size_bytes for piece in together[:-1]) <= UNIT_BYTES
    firsts = {share_of(together, rank, 1000)[0].name for rank in (0, 1, 500, 989)}
    assert len(firsts) == 4


def test_blocks_of_a_file_are_digested_once_by_all_ranks_together() -> None:
    size = 3 * UNIT_BYTES * TIMES + 12_345

    def blocks(num_ranks: int) -> list[int]:
        planned = plan_units([InputFile("a.jsonl", size)], world_size=num_ranks)
        sources = [source for unit in planned for source in unit.sources]
        starts = [num_blocks(source.start) for source in sources]
        ends = [num_blocks(source.end) for source in sources]
        assert [source.start % BLOCK_BYTES for source in sources] == [0] * len(sources)
        return [n for start, end in zip(starts, ends, strict=True) for n in range(start, end)]

    assert blocks(2) == blocks(2 * TIMES) == list(range(num_blocks(size)))


@pytest.mark.slow
def test_a_refresh_lists_its_sources_and_looks_at_each(tmp_path: Path) -> None:
    def planned(count: int) -> tuple[int, Counter[str]]:
        sources = tmp_path / f"sources-{count}"
        sources.mkdir()
        for number in range(count):
            path = sources / f"{number:03d}.jsonl"
            path.write_text(f'{{"text": "{number}"}}\n')
            os.utime(path, (1e9, 1e9))
        recipe = tmp_path / f"web-{count}.toml"
        recipe.write_text(
            f'corpus = ["{sources}/*.jsonl"]\n'
            '[tokenize]\ntokenizer_type = "NullTokenizer"\nvocab_size = 100\n'
        )
        written = read_recipe(str(recipe), str(tmp_path / f"yard-{count}"))
        plan_refresh(written)  # reads the sources
        with operations() as found:
            return calls(lambda: plan_refresh(written)), found

    few, many = planned(10), planned(10 * TIMES)
    assert few[1]["list"] == many[1]["list"] <= 3
    assert many[1].total() <= LINEAR * few[1].total()
    assert many[0] <= LINEAR * few[0]


@pytest.mark.slow
def test_a_sweep_of_a_corpus_grows_with_its_parts(tmp_path: Path) -> None:
    def counted(count: int) -> int:
        root = tmp_path / f"yard-{count}"
        corpus, names = Corpus(str(root)), [f"t{number:04d}" for number in range(count)]
        for version in (names[: count // 2], names, names[count // 2 :]):
            corpus.publish(*version)
        return calls(lambda: sweep(str(root), [], AT_ONCE, remove=True))

    assert grow(counted, 12) <= LINEAR


def test_a_lineage_of_more_parts_looks_at_each_edge_no_more_often() -> None:
    class Edges(list[Edge]):
        looks = 0

        def __iter__(self) -> Iterator[Edge]:
            Edges.looks += len(self)
            return super().__iter__()

    def looks(count: int) -> int:
        made = [
            *(Artifact(key=f"{n}.jsonl", stage="", digest="") for n in range(count)),
            *(Artifact(key=f"{n}", stage="tokenize", digest=f"d{n}") for n in range(count)),
            Artifact(key="all", stage="merge", digest="d"),
        ]
        edges = Edges((f"{n}.jsonl", f"{n}") for n in range(count))
        edges += [(f"{n}", "all") for n in range(count)]
        Edges.looks = 0
        shown = grouped(made, edges, "all")
        assert [one.count for one in shown.artifacts] == [count, count, 1]
        return Edges.looks

    assert grow(looks, 30) <= LINEAR
