"""Embeddings of chunks: whose, in which files, what a kill keeps, ranks and shares, mistakes."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("transformers")

import stages.retro_embed.run as stage
from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.cli import stage_main
from stages.runtime.context import StageRun
from tests.stages.directly import run_directly, run_process, torchrun
from tests.trainyard.embedding.encoders import embed, embedder, make
from tests.trainyard.retrieval.corpora import EOD, build, merged, write_corpus, write_two
from trainyard.artifacts import store
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedDataset
from trainyard.errors import ArtifactError, ConfigError, DataError, TrainyardError
from trainyard.retrieval.pretraining_chunks import as_document
from trainyard.retrieval.vectors import EmbeddingBlocks
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.options.samples import RunSamplesConfig
from trainyard.training.run_samples import open_chunks

CHUNKS = 20
"""Training chunks of `write_two`."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chunk database, published by its command, and an encoder of its vocabulary."""
    folder = tmp_path_factory.mktemp("yard")
    write_two(folder)
    make(folder / "bert")
    words = {
        "data-path": [str(folder / "en"), str(folder / "de")],
        "output-dir": [str(folder / "db")],
        "tokenizer-type": ["ByteLevelTokenizer"],
        "retro-bert-tokenizer-type": ["BertWordPieceLowerCase"],
        "retro-bert-vocab-file": [str(folder / "bert/vocab.txt")],
        "retro-gpt-chunk-length": ["8"],
        "retro-gpt-split": ["75,25,0"],
        "retro-index-ntrain": ["8"],
        "workers": ["1"],
    }
    from stages.retro_db.config import RetroDbConfig

    arguments = [word for name, values in words.items() for word in (f"--{name}", *values)]
    assert stage_main("retro_db", RetroDbConfig, "stages.retro_db.run", argv=arguments) == 0
    return folder


def options(yard: Path, out: Path | str, **more: Any) -> dict[str, Any]:
    given = {
        "retro_db": str(yard / "db"),
        "data_path": [str(yard / "en"), str(yard / "de")],
        "tokenizer_type": "ByteLevelTokenizer",
        "load": str(yard / "bert"),
        "retro_bert_max_chunk_length": 48,
        "retro_block_size": 4,
        "device": "cpu",
        "workers": 1,
        "output_dir": str(out),
        **more,
    }
    return {key: value for key, value in given.items() if value is not None}


def run(yard: Path, out: Path, **more: Any) -> dict[str, Any]:
    """The work, in this process and without a manifest."""
    return run_directly(RetroEmbedConfig, stage.run, **options(yard, out, **more))


def validate(yard: Path, out: Path, share: float, **more: Any) -> dict[str, Any]:
    """The comparison, which has no output."""
    config = from_dict(RetroEmbedConfig, options(yard, out, retro_task_validate=share, **more))
    inputs = {name: resolve(name, urls) for name, urls in config.inputs().items() if urls}
    with contextlib.closing(StageRun("test", inputs, config.output())) as context:
        return stage.run(config, context)


def words(yard: Path, out: Path | str, **more: Any) -> list[str]:
    """The options as a command line."""
    found = []
    for key, value in options(yard, out, **more).items():
        found += [
            f"--{key.replace('_', '-')}",
            *map(str, value if isinstance(value, list) else [value]),
        ]
    return found


def launch(yard: Path, out: Path | str, **more: Any) -> None:
    """The command, in this process."""
    arguments = words(yard, out, **more)
    check = "stages.retro_embed.inputs"
    assert stage_main("retro_embed", RetroEmbedConfig, stage.__name__, check, argv=arguments) == 0


def command(yard: Path, out: Path | str, **more: Any) -> Manifest:
    """The same; returns its manifest."""
    launch(yard, out, **more)
    config = from_dict(RetroEmbedConfig, options(yard, out, **more))
    output = config.output()
    assert output is not None
    found = read_manifest(output.manifest_url)
    assert found is not None
    return found[0]


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "blocks").iterdir())}


def vectors(out: Path) -> NDArray[np.float32]:
    blocks = EmbeddingBlocks.find([str(path) for path in (out / "blocks").iterdir()], str(out))
    return np.concatenate([rows for _, rows in blocks.read(1000)])


def texts(yard: Path, kind: str) -> list[str]:
    """Of the chunks of a database, by a plain loop; tokens are bytes from 1 on."""
    sources = [list(IndexedDataset(str(yard / name)).documents()) for name in ("en", "de")]
    found = []
    for dataset, document, start, end, _ in merged(yard, kind).tolist():
        tokens = np.concatenate(sources[dataset][document])[start:end]
        assert EOD not in tokens
        found.append(bytes(tokens.tolist()).decode())
    return found


# --- what is embedded ---------------------------------------------------------------------------


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


# --- validation ---------------------------------------------------------------------------------


def test_blocks_computed_again_are_equal(
    yard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command(yard, out)
    before = files(out)
    launch(yard, out, retro_task_validate=0.2)
    assert "1 of 5 blocks computed again" in capsys.readouterr().out
    metrics = validate(yard, out, 0.5)
    assert metrics == {"blocks": 3, "chunks": 12, "largest_difference": 0.0}
    assert "3 of 5 blocks computed again" in capsys.readouterr().out
    assert files(out) == before


def test_a_block_that_differs_is_named(yard: Path, tmp_path: Path) -> None:
    from trainyard.artifacts.digest import digest_bytes
    from trainyard.retrieval.vectors import write_block

    out = tmp_path / "out"
    command(yard, out)
    path = out / "blocks/04-08.hdf5"
    found = vectors(out)[4:8].copy()
    found[2, 5] += 1e-3 * np.linalg.norm(found[2])
    digest = digest_bytes(path.read_bytes())
    write_block(path, found)
    manifest = (out / "manifest.json").read_text()
    document = json.loads(manifest.replace(digest, digest_bytes(path.read_bytes())))
    from trainyard.artifacts.manifest import _from_document

    document["output_digest"] = _from_document(document).output_digest
    (out / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"04-08.hdf5: the vector of chunk 6 differs .* by 0.001 "):
        validate(yard, out, 1.0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pooling": "cls"}, "--pooling 'cls': .* was made with 'mean'"),
        ({"load": "other"}, r"input load \(.*other\) is not the one that .* was made from"),
    ],
)
def test_other_embeddings_are_not_validated(
    changed: dict[str, Any], words: str, yard: Path, tmp_path: Path
) -> None:
    command(yard, tmp_path / "out")
    if "load" in changed:
        make(tmp_path / "other", seed=2)
        changed = {"load": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match=words):
        validate(yard, tmp_path / "out", 1.0, **changed)


def test_nothing_to_validate_is_refused(yard: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no manifest.json, so there are no finished"):
        validate(yard, tmp_path / "out", 1.0)


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"load": None}, "one of --load .* and --embedder .* is needed, and neither was given"),
        ({"embedder": "x"}, "and both were given"),
        ({"retro_bert_vocab_file": "v"}, "belong together; add --retro-bert-tokenizer-type"),
        ({"rank": 0}, "--rank 0 needs --world-size"),
        ({"rank": 2, "world_size": 2}, "--rank 2: shares of --world-size 2 are 0 to 1"),
        ({"retro_task_validate": 1.5}, "--retro-task-validate is a share of the blocks"),
        ({"retro_task_validate": 0.5, "world_size": 2}, "leave --world-size out"),
        ({"retro_block_size": 0}, "--retro-block-size must be at least 1"),
        ({"chunks": "pretraining"}, "retro_db .* only applies with --chunks train; leave it out"),
        ({"chunks": "test"}, "chunks is 'test'"),
    ],
)
def test_wrong_options_are_refused(
    changed: dict[str, Any], words: str, yard: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(RetroEmbedConfig, options(yard, tmp_path, **changed))


def refused(yard: Path, out: Path, words: str, **changed: Any) -> None:
    with pytest.raises(TrainyardError, match=words):
        run(yard, out, **changed)
    assert not (out / "blocks").exists()


def test_wrong_inputs_are_refused_before_any_work(yard: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(
        yard,
        out,
        "names de .*, en .*, but .* was cut from",
        data_path=[str(yard / "de"), str(yard / "en")],
    )
    refused(
        *(yard, out, "NullTokenizer: .*db was cut with the ByteLevelTokenizer; give the same"),
        tokenizer_type="NullTokenizer",
        vocab_size=300,
    )
    vocabulary = tmp_path / "vocab.txt"
    lines = (yard / "bert/vocab.txt").read_text().splitlines()
    vocabulary.write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n")
    given = {
        "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
        "retro_bert_vocab_file": str(vocabulary),
    }
    refused(yard, out, "another vocabulary; give the encoder of", **given)
    vocabulary.write_text("\n".join(lines))  # the same tokens in another file
    run(yard, out, **given)


def test_a_database_without_chunks_is_refused(yard: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "en", ["a text of some words"])
    build(tmp_path, [str(tmp_path / "en")], retro_gpt_split="100,0,0")
    given = {"retro_db": str(tmp_path / "db"), "data_path": [str(tmp_path / "en")]}
    refused(yard, tmp_path / "out", "merged/valid.hdf5 has no chunk", chunks="valid", **given)


def test_tokens_outside_the_vocabulary_are_named(yard: Path, tmp_path: Path) -> None:
    """A database of another program says nothing of its tokenizer."""
    from tests.trainyard.corpus.token_files import write_tokens

    write_corpus(tmp_path / "en", ["abcdefgh" * 3])
    build(tmp_path, [str(tmp_path / "en")], retro_gpt_split="100,0,0")
    write_tokens(tmp_path / "en", [[[1] * 8 + [2] * 8 + [3] * 7 + [999, 0]]])
    given = {"retro_db": str(tmp_path / "db"), "data_path": [str(tmp_path / "en")]}
    with pytest.raises(DataError, match="token 999 of chunk 2 is outside the vocabulary of 512"):
        run(yard, tmp_path / "out", **given)


def test_numbers_that_fp16_cannot_hold_are_named(yard: Path, tmp_path: Path) -> None:
    import torch

    model = make(tmp_path / "bert")
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.weight.mul_(1e6)
        model.encoder.layer[0].output.LayerNorm.bias.fill_(7e4)
    model.save_pretrained(tmp_path / "bert")
    with pytest.raises(DataError, match=r"vector of chunk 0; with --fp16, .* give --bf16"):
        run(yard, tmp_path / "out", load=str(tmp_path / "bert"), fp16=True)


def test_progress_and_speed_are_logged(
    yard: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(yard, tmp_path / "out")
    lines = [record.getMessage() for record in caplog.records]
    assert any("embedded chunks=4 to 8 tokens=" in line and "per_second=" in line for line in lines)
    assert any(line.startswith("embedded chunks=20 tokens=") for line in lines)
