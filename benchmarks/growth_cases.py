"""The work of each row of `benchmarks.growth`: prepares a size, and returns what is measured."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trainyard.corpus.indexed import IndexedDataset, IndexedWriter

Prepare: TypeAlias = Callable[[int, Path], Callable[[], Any]]
"""(size, scratch folder) -> the work to measure, which may return arrays."""

SEED = 1
SEQ_LENGTH = 2048


def cpu_seconds() -> float:
    """Of this process and its children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _write_pair(prefix: Path, lengths: Sequence[int]) -> None:
    with Path(f"{prefix}.bin").open("wb") as out, Path(f"{prefix}.idx").open("wb") as idx:
        writer = IndexedWriter(out, np.uint16)
        for length in lengths:
            writer.add_document([np.zeros(length, np.uint16)])
        writer.write_index(idx)


# --- stages and flows ---------------------------------------------------------------------------


def _index_command(count: int, scratch: Path) -> list[str]:
    folder = scratch / f"datasets-{count}"
    if not folder.exists():
        folder.mkdir()
        for number in range(count):
            _write_pair(folder / f"d{number:05d}", [64 + number, *[64] * 19])
        for path in folder.iterdir():
            os.utime(path, (1e9, 1e9))
    paths = scratch / f"datasets-{count}.txt"
    paths.write_text(" ".join(f"1 {folder}/d{number:05d}" for number in range(count)))
    words = ["--data-args-path", str(paths), "--seq-length", "32", "--eval-iters", "0"]
    words += ["--train-samples", str(2 * count), "--global-batch-size", "10", "--split", "1,0,0"]
    output = ["--output-dir", str(scratch / f"index-{count}")]
    return [sys.executable, "-m", "stages.index", *words, *output]


def _merge(count: int, scratch: Path, *more: str) -> Callable[[], None]:
    _index_command(count, scratch)
    words = ["--input", str(scratch / f"datasets-{count}"), *more]
    command = [sys.executable, "-m", "stages.merge", *words]
    run_command(command)
    return lambda: run_command([*command, "--force"])


def merge_pairs(count: int, scratch: Path) -> Callable[[], None]:
    """One pair of pairs whose digests are known."""
    return _merge(count, scratch, "--output-prefix", str(scratch / f"merged-{count}/all"))


def merge_virtual(count: int, scratch: Path) -> Callable[[], None]:
    """A virtual dataset of pairs whose digests are known."""
    prefix = str(scratch / f"virtual-{count}/all")
    return _merge(count, scratch, "--virtual", "--output-prefix", prefix)


def read_virtual(count: int, scratch: Path) -> Callable[[], None]:
    """100,000 reads all over a virtual dataset, which a host has opened before."""
    merge_virtual(count, scratch)
    prefix = str(scratch / f"virtual-{count}/all")
    places = np.random.default_rng(SEED).integers(0, 20 * count, 100_000).tolist()
    IndexedDataset(prefix)

    def read() -> None:
        dataset = IndexedDataset(prefix)
        for place in places:
            dataset.get(place)

    return read


def index_outputs(count: int, scratch: Path) -> Callable[[], None]:
    """A stage with four files for each dataset."""
    command = _index_command(count, scratch)
    shutil.rmtree(scratch / f"index-{count}", ignore_errors=True)
    return lambda: run_command(command)


def index_again(count: int, scratch: Path) -> Callable[[], None]:
    """Its second run, which finds nothing to do."""
    command = _index_command(count, scratch)
    run_command(command)
    return lambda: run_command(command)


def _files_command(count: int, scratch: Path, name: str) -> list[str]:
    folder = scratch / f"{name}-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    runs = []
    for number in range(count):
        path = folder / f"{number:05d}.jsonl"
        path.write_text(json.dumps({"text": str(number)}) + "\n")
        os.utime(path, (1e9, 1e9))
        runs.append({"input": [str(path)], "output_prefix": str(folder / f"parts/{number:05d}")})
    document = scratch / f"{name}-{count}.json"
    options = {"tokenizer_type": "NullTokenizer", "vocab_size": 10_000, "workers": 1}
    document.write_text(json.dumps({**options, "runs": runs}))
    return [sys.executable, "-m", "stages.tokenize", "--config", str(document)]


def files_first(count: int, scratch: Path) -> Callable[[], None]:
    """A job of many small files to tokenize, as prepare-corpus starts it."""
    command = _files_command(count, scratch, "new-files")
    return lambda: run_command(command)


def files_again(count: int, scratch: Path) -> Callable[[], None]:
    """A job of many files that are tokenized already."""
    command = _files_command(count, scratch, "files")
    run_command(command)
    return lambda: run_command(command)


def one_document(size: int, scratch: Path) -> Callable[[], None]:
    """A document of so many bytes, tokenized."""
    path = scratch / f"document-{size}.jsonl"
    path.write_text(json.dumps({"text": "12345 " * (size // 6)}) + "\n")
    words = ["--input", str(path), "--tokenizer-type", "NullTokenizer", "--vocab-size", "20000"]
    words += ["--workers", "1", "--output-prefix", str(scratch / f"document-{size}/all")]
    return lambda: run_command([sys.executable, "-m", "stages.tokenize", *words, "--force"])


def run_command(command: Sequence[str]) -> None:
    """Run a program to its end."""
    subprocess.run(command, check=True, capture_output=True)


def refresh(count: int, scratch: Path) -> Callable[[], None]:
    """A refresh of sources whose digests are known, all of them new."""
    from flows.recipes.recipe import read_recipe
    from flows.recipes.refresh import plan_refresh

    sources = scratch / f"sources-{count}"
    sources.mkdir(exist_ok=True)
    for number in range(count):
        path = sources / f"{number:06d}.jsonl"
        path.write_text(json.dumps({"text": str(number)}) + "\n")
        os.utime(path, (1e9, 1e9))
    recipe = scratch / f"web-{count}.toml"
    recipe.write_text(
        f'corpus = ["{sources}/*.jsonl"]\n[tokenize]\ntokenizer_type = "NullTokenizer"\n'
        "vocab_size = 1000\n"
    )
    written = read_recipe(str(recipe), str(scratch / f"yard-{count}"))
    plan_refresh(written)

    def plan() -> None:
        assert len(plan_refresh(written).tokenize) == count

    return plan


def collect(count: int, scratch: Path) -> Callable[[], None]:
    """A sweep of a corpus with a current and two old versions, half of the parts unused; it removes
    what it finds."""
    from flows.gc.sweep import sweep
    from tests.flows.gc.yards import AT_ONCE, Corpus

    root = scratch / f"gc-{count}"
    shutil.rmtree(root, ignore_errors=True)
    synced, os.fsync = os.fsync, lambda _: None
    corpus, names = Corpus(str(root)), [f"t{number:06d}" for number in range(count)]
    for version in (names[: count // 2], names, names[count // 2 :]):
        corpus.publish(*version)
    os.fsync = synced

    def remove() -> None:
        assert len(sweep(str(root), [], AT_ONCE, remove=True).removed) > count // 2

    return remove


# --- data ---------------------------------------------------------------------------------------


def weights_of(count: int, kind: str = "uniform") -> list[float]:
    """Weights of datasets, whose sum is 1."""
    random = np.random.default_rng(SEED)
    drawn = np.ones(count)
    if kind == "uniform":
        drawn = random.random(count)
    elif kind == "uneven":
        drawn = random.lognormal(0, 3, count)
    weights: list[float] = (drawn / drawn.sum()).tolist()
    return weights


def blend(datasets: int, kind: str, size: int, scratch: Path) -> Callable[[], Any]:
    """Which of so many datasets each sample comes from, as a rank makes it: as an entry of the
    cache of indices. The compiled loop is loaded."""
    from trainyard.datasets import blend as blends
    from trainyard.datasets.index_cache import IndexCache

    weights, folder = weights_of(datasets, kind), scratch / f"blend-{datasets}-{size}"
    shutil.rmtree(folder, ignore_errors=True)
    blends.start(datasets)

    def build() -> Any:
        IndexCache(str(folder)).blend(weights, size)
        return _read_files(folder)

    return build


def blend_peer(datasets: int, kind: str, size: int, scratch: Path) -> Callable[[], Any]:
    """The peer's, kept as Megatron-LM does."""
    import helpers_cpp

    folder = scratch / f"blend-peer-{datasets}-{size}"
    folder.mkdir(exist_ok=True)
    # Ours normalises its weights once more.
    weights = np.array(weights_of(datasets, kind))
    weights /= weights.sum()

    def build() -> Any:
        chosen, ranks = np.empty(size, np.int16), np.empty(size, np.int64)
        helpers_cpp.build_blending_indices(chosen, ranks, weights, datasets, size, False)
        np.save(folder / "peer.dataset_index.npy", chosen)
        np.save(folder / "peer.dataset_sample_index.npy", ranks)
        return _read_files(folder)

    return build


def _read_files(folder: Path) -> Any:
    """The arrays of a blend in files, a part at a time: mapped whole, they would be memory."""
    for ending, dtype in (("dataset_index", np.int16), ("dataset_sample_index", np.int64)):
        (path,) = folder.glob(f"*.{ending}.npy")
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            while len(part := np.fromfile(file, dtype, 1 << 17)):
                yield part


def _order(count: int) -> tuple[Any, Any]:
    random = np.random.default_rng(SEED)
    lengths = random.integers(1, 2000, count, dtype=np.int32)
    return lengths, random.permutation(count).astype(np.int32)


def samples(count: int, scratch: Path) -> Callable[[], Any]:
    """Where samples begin."""
    from trainyard.datasets.samples import locate_samples

    lengths, order = _order(count)
    total = int(lengths.sum(dtype=np.int64))
    return lambda: (locate_samples(lengths, order, SEQ_LENGTH, 1, True, total),)


def samples_peer(count: int, scratch: Path) -> Callable[[], Any]:
    """The peer's."""
    import helpers_cpp

    lengths, order = _order(count)
    total = int(lengths.sum(dtype=np.int64))
    return lambda: (
        helpers_cpp.build_sample_idx_int32(lengths, order, SEQ_LENGTH, 1, total, True, 1),
    )


def start(count: int, scratch: Path) -> Callable[[], None]:
    """A pair opened and its indices found in the cache, as every rank does after the first one of
    its host. Only the .idx is real: the .bin is a file with a hole."""
    from trainyard.datasets.config import DataConfig
    from trainyard.datasets.gpt import GPTDataset
    from trainyard.datasets.index_cache import IndexCache
    from trainyard.datasets.sample_format import SampleFormat
    from trainyard.datasets.splits import documents_of_split

    prefix = str(scratch / f"documents-{count}")
    if not Path(f"{prefix}.idx").exists():
        _write_index(prefix, count)

    def open_and_find() -> None:
        file = IndexedDataset(prefix)
        form = SampleFormat(SEQ_LENGTH, seed=SEED, vocab_size=10, eod=0)
        documents = documents_of_split(file, DataConfig(data_path=(prefix,)), form, "train")
        GPTDataset(file, documents, 1000, form, indexer=IndexCache(str(scratch / "indices")))

    open_and_find()
    return open_and_find


def _write_index(prefix: str, count: int) -> None:
    from trainyard.corpus.layout import write_array, write_header, write_offsets

    lengths = np.full(count, 100, np.int32)
    with Path(f"{prefix}.idx").open("wb") as idx:
        write_header(idx, np.dtype(np.uint16), count, count + 1)
        write_array(idx, lengths, "<i4")
        write_offsets(idx, lengths, 2)
        write_array(idx, np.arange(count + 1, dtype=np.int64), "<i8")
    with Path(f"{prefix}.bin").open("wb") as out:
        out.truncate(200 * count)
    for ending in (".idx", ".bin"):
        os.utime(prefix + ending, (1e9, 1e9))
