"""Embeddings of chunks: whose, in which files, what a kill keeps, ranks and shares."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import stages.retro_embed.run as stage
from tests.stages.directly import run_process, torchrun
from tests.stages.embed_runs import (
    CHUNKS,
    command,
    files,
    launch,
    make_yard,
    run,
    texts,
    vectors,
    words,
)
from tests.trainyard.embedding.encoders import embed, embedder
from tests.trainyard.retrieval.corpora import EOD
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.config import from_dict
from trainyard.errors import ArtifactError
from trainyard.retrieval.pretraining_chunks import as_document
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.options.samples import RunSamplesConfig
from trainyard.training.run_samples import open_chunks


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chunk database, and an encoder of its vocabulary."""
    return make_yard(tmp_path_factory.mktemp("yard"))


# --- what is embedded ---------------------------------------------------------------------------


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", ["train", "sampled", "valid"])
def test_every_chunk_has_its_vector_under_its_number(kind: str, yard: Path, tmp_path: Path) -> None:
    metrics = run(yard, tmp_path / "out", chunks=kind)
    mine = embedder(yard / "bert")
    wanted = embed(mine, texts(yard, kind))
    np.testing.assert_allclose(vectors(tmp_path / "out"), wanted, rtol=0, atol=1e-6)
    seconds = metrics.pop("seconds")
    assert seconds > 0
    _, num_tokens = mine.prepare(texts(yard, kind))
    assert metrics == {"chunks": len(wanted), "tokens": num_tokens, "dimensions": 32}
    names = list(files(tmp_path / "out"))
    assert names[0].startswith("0")
    assert len(names) == -(-len(wanted) // 4)


def test_the_log_estimates_the_time_once(
    yard: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "FEWEST_PROBED", 2)
    with caplog.at_level(logging.INFO, logger=stage.__name__):
        run(yard, tmp_path / "out")
    said = [one for one in caplog.messages if "estimated_minutes" in one]
    assert said == [f"embedding chunks={CHUNKS} estimated_minutes=0.0"]
    assert caplog.messages.index(said[0]) == 0, "before the first block"


def test_chunks_of_a_trainings_samples_are_embedded_in_its_order(
    yard: Path, tmp_path: Path
) -> None:
    """All tokens of a chunk, ends of documents included."""
    samples = {
        **{"seq_length": 16, "global_batch_size": 2, "train_samples": 6, "eval_iters": 0},
        **{"split": "100,0,0", "seed": 5},
        "data_path": ["0.5", str(yard / "en"), "0.5", str(yard / "de")],
    }
    given = {"chunks": "pretraining", "retro_db": None, "retro_gpt_chunk_length": 8, **samples}
    run(yard, tmp_path / "out", **given)
    config = from_dict(RunSamplesConfig, samples)
    chunks = open_chunks(config, "train", 8)
    gpt = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    wanted = [gpt.decode(row) for row in chunks.token_rows(0, len(chunks)).tolist()]
    assert len(wanted) == 12
    assert any(gpt.decode([EOD]) in text for text in wanted)
    expected = embed(embedder(yard / "bert"), wanted)
    np.testing.assert_allclose(vectors(tmp_path / "out"), expected, rtol=0, atol=1e-6)
    said = json.loads((tmp_path / "out/samples.json").read_text())
    assert said == as_document(chunks.identity())


def test_a_function_of_a_package_embeds(
    yard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "our_lengths.py").write_text(
        "import numpy as np\n"
        "def embed(texts):\n"
        "    return np.array([[len(text), 1] for text in texts], np.float32)\n"
    )
    info = tmp_path / "ours-2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 2\n")
    (info / "entry_points.txt").write_text("[trainyard.embedders]\nlengths = our_lengths:embed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    manifest = command(yard, tmp_path / "out", load=None, embedder="lengths")
    wanted = [[len(text), 1] for text in texts(yard, "train")]
    assert vectors(tmp_path / "out").tolist() == wanted
    assert manifest.code["ours"] == "2"


# --- the same bytes -----------------------------------------------------------------------------


def test_a_killed_run_goes_on_at_its_block(
    yard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(yard, tmp_path / "whole")
    original, calls = stage.write_block, []

    def write(path: Path, rows: Any) -> None:
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(path, rows)

    monkeypatch.setattr(stage, "write_block", write)
    with pytest.raises(KeyboardInterrupt):
        run(yard, tmp_path / "out")
    assert len(files(tmp_path / "out")) == 2
    metrics = run(yard, tmp_path / "out")
    assert sum(calls) == CHUNKS + 4, "two blocks, the one that was cut off, then it and the rest"
    assert metrics["chunks"] == CHUNKS
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_threads_give_the_same_bytes(yard: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        run(yard, tmp_path / str(workers), workers=workers, retro_bert_batch_size=1)
    assert files(tmp_path / "1") == files(tmp_path / "3")


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_give_the_same_bytes(yard: Path, tmp_path: Path) -> None:
    whole = command(yard, tmp_path / "whole")
    run_process("stages.retro_embed", *words(yard, tmp_path / "out", nproc_per_node=2))
    found = read_manifest(str(tmp_path / "out/manifest.json"))
    assert found is not None
    assert found[0].files == whole.files
    assert found[0].metrics["tokens"] == whole.metrics["tokens"]
    run(yard, tmp_path / "one", retro_block_size=CHUNKS)
    again = words(yard, tmp_path / "out", retro_block_size=CHUNKS)
    launcher = torchrun("--standalone", "--nproc-per-node", "2")
    run_process("stages.retro_embed", *again, launcher=launcher)  # more ranks than blocks
    assert files(tmp_path / "out") == files(tmp_path / "one"), "no file of the other blocks stays"
    assert "nothing to do" in run_process("stages.retro_embed", *again)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 6])
def test_joined_shares_are_the_bytes_of_one_run(count: int, yard: Path, tmp_path: Path) -> None:
    whole = command(yard, tmp_path / "whole")
    out = tmp_path / "out"
    for rank in reversed(range(count)):
        command(yard, out, rank=rank, world_size=count)
    joined = command(yard, out, world_size=count)
    assert joined.files == whole.files
    assert {**joined.metrics, "seconds": 0} == {**whole.metrics, "seconds": 0}
    assert joined.output_digest == whole.output_digest
    assert not (tmp_path / "out.shares").exists()
    launch(yard, out, rank=0, world_size=count)  # an array task that was tried again
    assert not (tmp_path / "out.shares").exists()


@pytest.mark.slow
def test_stores_are_alike(yard: Path, store_url: str, tmp_path: Path) -> None:
    whole = command(yard, tmp_path / "whole")
    out = store.join(store_url, "out")
    for rank in range(2):
        command(yard, out, rank=rank, world_size=2)
    assert command(yard, out, world_size=2).files == whole.files
    assert store.list_files(f"{out}.shares") == {}


def test_a_missing_share_is_named(yard: Path, tmp_path: Path) -> None:
    command(yard, tmp_path / "out", rank=0, world_size=3)
    with pytest.raises(ArtifactError, match="of 3 shares, those of rank 1, 2 are not made yet"):
        run(yard, tmp_path / "out", world_size=3)


def test_progress_and_speed_are_logged(
    yard: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(yard, tmp_path / "out")
    lines = [record.getMessage() for record in caplog.records]
    assert any("embedded chunks=4 to 8 tokens=" in line and "per_second=" in line for line in lines)
    assert any(line.startswith("embedded chunks=20 tokens=") for line in lines)
