"""Runs of retro_embed on a small chunk database with a small random encoder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stages.retro_embed.run as stage
from stages.retro_db.config import RetroDbConfig
from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.cli import stage_main
from stages.runtime.context import StageRun
from tests.stages.directly import run_directly
from tests.trainyard.embedding.encoders import make
from tests.trainyard.retrieval.corpora import EOD, merged, write_two
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedDataset
from trainyard.retrieval.vectors import EmbeddingBlocks

CHUNKS = 20
"""Training chunks of `write_two`."""


def make_yard(folder: Path) -> Path:
    """A chunk database, published by its command, and an encoder of its vocabulary."""
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
