"""The parts of tokenize by themselves: planning, the rule of ends, packs, the sample."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.tokenize import pack as pack_module
from stages.tokenize import run as tokenize_run
from stages.tokenize import unit as unit_module
from stages.tokenize.encode import encode_block, sampled
from stages.tokenize.pack import Pack, Summary
from tests.stages.tokenize_runs import documents, files, numbered, tokenize, write
from trainyard.artifacts import store
from trainyard.corpus import unit_sizes
from trainyard.corpus.formats.records import DocumentColumns
from trainyard.corpus.indexed import IndexedWriter
from trainyard.corpus.unit_sizes import unit_bytes_for
from trainyard.corpus.units import InputFile, plan_units, share_of
from trainyard.errors import ArtifactError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.null import NullTokenizer


def block_of(texts: list[list[str]]) -> DocumentColumns:
    places = np.arange(len(texts), dtype=np.int64)
    flat = [text for doc in texts for text in doc]
    return DocumentColumns(
        places * 10, places, places + 1, None, (flat,), ([len(doc) for doc in texts],)
    )


def test_some_documents_of_a_block_are_a_block() -> None:
    block = block_of([["1"], ["2", "3"], [], ["4"]])
    found = list(block.only([1, 2]).documents())
    assert found == list(block.documents())[1:3]
    assert len(block.only([])) == 0


# --- planning ---------------------------------------------------------------------------------


def test_units_cover_every_file_in_order() -> None:
    sizes = [30 << 20, 0, 5, 1 << 20, 9 << 20, 3 << 20, 6 << 20, 7]
    files = [InputFile(f"f{i}.jsonl", size) for i, size in enumerate(sizes)]
    planned = plan_units(files)
    ranges = [source for unit in planned for source in unit.sources]
    assert len({unit.name for unit in planned}) == len(planned)
    for file in files:
        own = [r for r in ranges if r.url == file.url]
        assert sum(r.size_bytes for r in own) == file.size_bytes
        assert all(a.end == b.start for a, b in itertools.pairwise(own))
    assert [r.url for r in ranges] == sorted(r.url for r in ranges)
    assert all(unit.size_bytes <= unit_sizes.UNIT_BYTES for unit in planned)
    assert [len(unit.sources) for unit in planned] == [1, 1, 1, 1, 2, 1, 1, 1, 2]


def test_units_grow_with_the_input_instead_of_becoming_many() -> None:
    assert unit_bytes_for(1) == unit_bytes_for(30 << 30) == 8 << 20
    assert unit_bytes_for(1 << 50) == 1 << 38
    many = plan_units([InputFile(f"{i}.txt", 100_000) for i in range(2000)])
    assert len(many) < 30


@pytest.mark.parametrize("world_size", [1, 2, 7, 100])
def test_shares_are_neighbours_and_alike(world_size: int) -> None:
    planned = plan_units([InputFile("a.jsonl", 200 << 20), InputFile("b.json.gz", 50 << 20)])
    shares = [share_of(planned, rank, world_size) for rank in range(world_size)]
    assert [unit for share in shares for unit in share] == planned
    loads = [sum(unit.size_bytes for unit in share) for share in shares]
    largest = max(unit.size_bytes for unit in planned)
    assert max(loads) <= (250 << 20) / world_size + largest
    assert share_of([], 0, 3) == []


# --- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("eod", [None, 999])
def test_ends_and_empty_sentences_follow_the_simple_rule(eod: int | None) -> None:
    tokenizer = NullTokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000))
    draw = random.Random(1)
    for _ in range(60):
        texts = [
            [" ".join("7" * draw.choice([0, 0, 1, 3])) for _ in range(draw.choice([0, 1, 1, 4]))]
            for _ in range(draw.randrange(6))
        ]
        expected = [[tokenizer.encode(text) for text in doc if text] for doc in texts]
        for doc in expected:
            if doc and eod is not None:
                doc[-1] = [*doc[-1], eod]
        found = encode_block(tokenizer, block_of(texts), 0, eod)
        flat = [ids for doc in expected for ids in doc]
        assert found.ids.tolist() == [token for ids in flat for token in ids]
        assert found.sequence_lengths.tolist() == [len(ids) for ids in flat]
        assert found.sequences_per_document.tolist() == [len(doc) for doc in expected]


def test_the_sample_is_a_function_of_the_place_and_of_the_share() -> None:
    block = block_of([["1"]] * 5000)
    chosen = sampled(block, 3, 0.2)
    assert 850 < chosen.sum() < 1150
    assert (chosen == sampled(block, 3, 0.2)).all()
    assert (chosen != sampled(block, 4, 0.2)).any()
    assert (chosen <= sampled(block, 3, 0.3)).all()
    assert sampled(block, 3, 1.0).all()
    assert not sampled(block, 3, 0.0).any()


# --- packs ------------------------------------------------------------------------------------


def write_pack(path: Path, docs: list[list[list[int]]]) -> Summary:
    with path.open("wb") as out:
        writer = IndexedWriter(out, np.uint16)
        for doc in docs:
            writer.add_document(doc)
        writer.write_index(out)
        tokens = writer.num_tokens
        summary = Summary(len(docs), writer.num_sequences, tokens, dtype="<u2")
        summary.bin_bytes, summary.idx_bytes = 2 * tokens, out.tell() - 2 * tokens
        summary.write(out)
    return summary


def test_pack_is_read_in_any_lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    docs = [[[draw.randrange(9)] * draw.randrange(1, 30)] * draw.randrange(3) for _ in range(50)]
    summary = write_pack(tmp_path / "pack", docs)
    for tokens, count in ((1, 1), (7, 3), (100, 64), (10**6, 10**6)):
        monkeypatch.setattr(pack_module, "LOT_TOKENS", tokens)
        monkeypatch.setattr(pack_module, "LOT_DOCUMENTS", count)
        found = []
        with Pack(tmp_path / "pack") as pack:
            assert pack.summary == summary
            for ids, lengths, counts in pack.lots():
                ends = iter(np.split(ids, np.cumsum(lengths)))
                found += [[next(ends).tolist() for _ in range(n)] for n in counts]
        assert found == docs


def test_a_damaged_pack_is_refused(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack", [[[1, 2]], []])
    whole = (tmp_path / "pack").read_bytes()
    for torn in (b"", whole[:5], whole[:-1], whole[1:], whole[:-8] + b"\xff" * 8, whole + b"\0"):
        (tmp_path / "torn").write_bytes(torn)
        with pytest.raises(ArtifactError, match="unfinished work of an earlier run is damaged"):
            Pack(tmp_path / "torn")


# --- large texts ------------------------------------------------------------------------------


def test_large_texts_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(60))
    tokenize(path, tmp_path / "plain")
    at_once: list[int] = []
    real: Any = unit_module.encode_block

    def counted(*args: Any) -> Any:
        at_once.append(1)
        assert len(at_once) == 1
        encoded = real(*args)
        at_once.pop()
        return encoded

    monkeypatch.setattr(unit_module, "LARGE_LETTERS", 1)
    monkeypatch.setattr(unit_module, "encode_block", counted)
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 200)
    monkeypatch.setattr(NullTokenizer, "releases_gil", True)
    tokenize(path, tmp_path / "turns", workers=2)
    assert files(tmp_path / "turns") == files(tmp_path / "plain")


@pytest.mark.slow
def test_a_document_longer_than_many_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"text": " ".join(["7"] * 5000)}
    path = write(tmp_path / "a.jsonl", {"text": "1"}, long, {"text": "2"})
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 300)
    tokenize(path, tmp_path / "out", workers=2)
    assert documents(tmp_path / "out") == [[[1]], [[7] * 5000], [[2]]]


def test_threads_that_wait_for_a_store_take_turns_at_the_tokenizer(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(300))
    tokenize(path, tmp_path / "plain")
    at_once: list[int] = []
    threads: set[int] = set()
    real: Any = unit_module.encode_block

    def counted(*args: Any) -> Any:
        at_once.append(1)
        assert len(at_once) == 1
        threads.add(threading.get_ident())
        time.sleep(0.005)
        encoded = real(*args)
        at_once.pop()
        return encoded

    monkeypatch.setattr(unit_module, "encode_block", counted)
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 2000)
    tokenize(path, store.join(s3_url, "a"), workers=1)
    assert len(threads) == tokenize_run.WAITING
    assert files(store.join(s3_url, "a")) == files(tmp_path / "plain")
