"""Work grows in proportion to its size: writes, listings and calls are counted at two sizes.

Counts are the same on any machine, unlike times; a square that comes back fails here. For times and
memory: `benchmarks.growth`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from benchmarks import growth_load
from flows.gc.sweep import sweep
from flows.recipes.recipe import read_recipe
from flows.recipes.refresh import plan_refresh
from stages.report.lineage import Artifact, Edge, grouped
from stages.runtime.context import WorkFolder
from stages.runtime.up_to_date import decide
from stages.tokenize.config import TokenizeConfig
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
from trainyard.checkpoint.node_local.visibility import firsts_of
from trainyard.checkpoint.plan import Slice, plan_files, plan_shards
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
from trainyard.datasets.blended import Blended
from trainyard.datasets.config import DataConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ProcessGroups
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.training.loop.batch_size import BatchSize
from trainyard.training.loop.data import RunData
from trainyard.training.loop.ledger import digest_samples
from trainyard.training.loop.sample_check import ConsumedSamples, SampleCheck
from trainyard.training.loop.seeds import microbatch_seed

TIMES = 4
"""How much larger the second size is."""

LINEAR = 1.2 * TIMES
"""Most growth: a square would be 16 times."""


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


def calls(work: Callable[[], object]) -> int:
    """Calls of functions during some work, those of the interpreter included."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def grow(measure: Callable[[int], int], size: int) -> float:
    """How many times larger a count is for a size `TIMES` as large."""
    return measure(TIMES * size) / max(measure(size), 1)


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


def test_rank_0_digests_a_larger_batch_in_as_many_calls() -> None:
    """Numpy's calls are over all samples, and no loop of Python's is."""
    datasets, counts = 20, []
    for dp in (8, 8 * TIMES):
        samples = np.arange(4 * dp)
        sources: Any = [Numbered()] * datasets
        blended = Blended(sources, (samples % datasets).astype(np.int16), samples)
        size, groups = BatchSize(len(samples), 1, dp), ProcessGroups(ParallelDims(dp=dp), 0)
        data = RunData(DataConfig(data_path=("none",)), blended, (), size, 0)
        check = SampleCheck(1, size, 7, groups, data.expected_samples(0))
        taken = ConsumedSamples(1, size.num_microbatches)
        for micro, own in enumerate(samples[::dp]):
            taken.ids.append(blended.ids(np.array([own])))
            taken.seeds[0, micro] = (microbatch_seed(7, 1, micro * dp),)
        counts.append(calls(partial(check.check, taken)))
        assert check.samples == digest_samples(blended.ids(samples))
    assert counts[0] == counts[1]


class Numbered:
    """A source whose samples are numbered as they come."""

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices


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


def slices(count: int) -> list[Slice]:
    shapes = [(8 + number % 7, 4) for number in range(count)]
    return [Slice(f"model.{n:03d}", "F32", shape, (0, 0), shape) for n, shape in enumerate(shapes)]


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


def test_a_plan_of_more_files_looks_at_no_more_of_them() -> None:
    def counted(num_files: int) -> int:
        return calls(lambda: plan_shards("model", slices(400), num_files))

    assert grow(counted, 20) <= 1.5


@pytest.mark.parametrize("num_shards", [1, 3, 10, 12, 50])
def test_a_plan_of_files_is_that_of_writers_that_hold_all_slices(num_shards: int) -> None:
    every = slices(12)
    held = [list(every)] * num_shards
    assert plan_shards("model", every, num_shards) == plan_files("model", held, sys.maxsize)


def test_a_rank_that_loads_from_nodes_plans_no_more_with_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth_load, "MATRICES", 20)

    def counted(num_ranks: int) -> int:
        return calls(growth_load.load_local(num_ranks, tmp_path))

    assert grow(counted, 64) <= 1.2


def test_ranks_that_see_one_folder_find_it_without_a_look_at_each_pair() -> None:
    def counted(num_ranks: int) -> int:
        return calls(lambda: firsts_of([((0, num_ranks),)] * num_ranks))

    assert grow(counted, 100) <= LINEAR
