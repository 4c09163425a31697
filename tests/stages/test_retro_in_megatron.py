"""Megatron core's own Retro classes (0.15.3, the last release with them) open projects of our
stages, and read the chunks, samples and neighbours that we read.

    .venv/bin/python -m pytest -m full tests/stages/test_retro_in_megatron.py

installs that release in a folder of its own, and skips where pip cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("faiss")

from tests.stages.directly import run_process
from tests.stages.test_retro_preprocess import options, words_of
from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.retrieval.corpora import EOD, LENGTH, write_corpus, write_vocabulary
from tests.trainyard.retrieval.samples import sentences
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.retro import Retro

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

VERSION = "0.15.3"
PROGRAM = Path(__file__).with_name("megatron_retro_program.py")
"""Not imported: it is for a process of its own."""

Ints = NDArray[np.int64]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the stages, from text to neighbours, in blocks that do not end with a sample."""
    megatron_package.installed(VERSION)  # or the tests are skipped before the work
    make = pytest.importorskip("tests.trainyard.embedding.encoders").make
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    for seed, name in enumerate(("en", "de")):
        write_corpus(folder / "data" / name, sentences(60, seed))
    write_vocabulary(folder)
    make(folder / "bert")
    words = words_of(options(folder, retro_block_size=30, retro_doc_block_size=25))
    run_process("stages.retro_preprocess", *words, seconds=1200)
    return folder


def exported(project: Path, tmp_path: Path) -> Path:
    """Laid out as by Megatron-LM's tools."""
    words = ["--retro-project-dir", str(project), "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "stages.retro_export", *words, "--copy-data"]
    subprocess.run(command, check=True, timeout=300)
    return tmp_path / "out"


@pytest.mark.every_case
@pytest.mark.parametrize("layout", ["ours", "exported"])
def test_megatron_core_reads_the_chunks_samples_and_neighbours_of_a_project(
    project: Path, tmp_path: Path, layout: str
) -> None:
    place = project if layout == "ours" else exported(project, tmp_path)
    out = tmp_path / "found.npz"
    megatron_package.run(VERSION, PROGRAM, [str(place), str(EOD), str(out)], tmp_path)
    with np.load(out) as found:
        _check(found, Retro.open(str(project)), project)


def _check(found: Mapping[str, Any], ours: Retro, project: Path) -> None:
    database = ours.get_db_dataset()
    assert np.array_equal(found["chunks_train"], padded(database))
    for kind in ("sampled", "valid"):
        assert len(found[f"chunks_{kind}"]) == len(rows_of(project, kind))
    crossed = 0
    for split in ("train", "valid"):
        count = ours.get_pt_num_samples(split)
        assert count == len(found[f"{split}_text"]) > 0
        for number in range(count):
            sample = ours.get_pt_sample(split, number)
            chunks, tokens, text = (
                found[f"{split}_{key}"][number]
                for key in ("neighbor_chunks", "neighbor_tokens", "text")
            )
            assert np.array_equal(text[:-1], sample["text"])  # with the label of the last token
            ids = sample["neighbor_ids"]
            there = ids != NO_CHUNK
            assert np.array_equal(chunks[there][:, 0], ids[there])
            # What follows a document's last chunk is of another document there, and none here.
            goes_on = database.continuations(ids) != NO_CHUNK
            assert np.array_equal(tokens[goes_on], sample["neighbor_tokens"][goes_on])
            assert np.array_equal(
                tokens[there][:, :LENGTH], sample["neighbor_tokens"][there][:, :LENGTH]
            )
            crossed += int((there & ~goes_on).sum())
    assert crossed > 0


def padded(database: ChunkDatabase) -> Ints:
    """(n, LENGTH) the tokens of every chunk, short ones filled up with the end of document."""
    return database.token_rows(np.arange(len(database)), LENGTH, pad=EOD)


def rows_of(project: Path, kind: str) -> Ints:
    """The chunks of a merged database, by h5py."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(project / f"db/merged/{kind}.hdf5") as file:
        rows: Ints = file["chunks"][()]
    return rows
