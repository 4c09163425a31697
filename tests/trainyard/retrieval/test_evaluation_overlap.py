"""Chunks that repeat text of evaluation sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.retrieval.samples import make_yard, sentences
from trainyard.corpus.indexed import IndexedDataset
from trainyard.retrieval import evaluation_overlap
from trainyard.retrieval.evaluation_overlap import RunsOfTokens, repeating_chunks, run_hashes


def test_equal_runs_have_equal_hashes_and_others_do_not() -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 500)
    hashes = run_hashes(tokens, 4)
    runs = {}
    for place, value in enumerate(hashes.tolist()):
        runs.setdefault(value, set()).add(tuple(tokens[place : place + 4].tolist()))
    assert len(hashes) == 497
    assert all(len(of_hash) == 1 for of_hash in runs.values())
    assert len(runs) == len({tuple(tokens[i : i + 4].tolist()) for i in range(497)})
    assert len(run_hashes(tokens[:3], 4)) == 0


@pytest.mark.parametrize("length", [3, 6, 8])
def test_a_chunk_repeats_a_set_if_a_run_of_its_tokens_is_in_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(evaluation_overlap, "TOKENS_AT_ONCE", 50)
    monkeypatch.setattr(evaluation_overlap, "CHUNKS_AT_ONCE", 7)
    yard = make_yard(tmp_path, documents=30)
    texts = [text[3:] for text in sentences(30, 0)[4:7]] + ["ab", ""]
    parts = [[text.encode()[:9], text.encode()[9:]] for text in texts]  # two sequences each
    prefix = write_tokens(tmp_path / "set", [[list(part) for part in two] for two in parts])
    runs = RunsOfTokens([IndexedDataset(prefix)], length)
    assert runs.num_short == 2
    database = yard.database()
    expected = []
    for number in range(len(database)):
        chunk = bytes(database.tokens(number).tolist())
        pieces = [chunk[i : i + length] for i in range(len(chunk) - length + 1)]
        expected.append(any(piece in text.encode() for piece in pieces for text in texts))
    assert any(expected)
    assert not all(expected)
    assert repeating_chunks(database, runs).tolist() == expected
