"""A Retro index that grows with its corpus, by the real flow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.embedding.encoders import make
from tests.yard.yard import Yard
from trainyard.artifacts.manifest import read_manifest
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.tokenizers.wordpiece import SPECIAL

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

RECIPE = """
corpus = ["{folder}/arrivals/*.jsonl"]
encoder = "{folder}/bert"

[tokenize]
tokenizer_type = "NullTokenizer"
vocab_size = 300
append_eod = true

[retro_db]
retro_index_ntrain = 100
retro_gpt_chunk_length = 4
retro_bert_tokenizer_type = "BertWordPieceLowerCase"
retro_bert_vocab_file = "{folder}/vocab.txt"

[retro_embed]
retro_bert_max_chunk_length = 48
"""


def write(folder: Path, name: str, first: int) -> None:
    (folder / "arrivals").mkdir(exist_ok=True)
    lines = [
        json.dumps({"text": " ".join(str((first + i * j) % 10) for j in range(12))})
        for i in range(1, 6)
    ]
    (folder / "arrivals" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def refresh(yard: Yard) -> dict[str, Any]:
    text = RECIPE.format(folder=yard.folder)
    done = yard.run("-m", "flows.corpus_refresh", yard.recipe(text))
    assert done.status == 0, done.err
    pointer = Path(done.out.split()[-1]).parent / "retro/current.json"
    found: dict[str, Any] = json.loads(pointer.read_text())
    return found


def test_new_documents_are_added_to_a_version_of_the_index(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *"0123456789"]) + "\n")
    words = len(SPECIAL) + 10
    make(tmp_path / "bert", vocab_size=words, vocabulary=str(vocabulary))
    write(tmp_path, "b", 0)
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    first = refresh(yard)
    before = (Path(first["index"]) / "added.faissindex").read_bytes()
    assert len(ChunkDatabase(first["database"])) == 15

    write(tmp_path, "a", 3)
    second = refresh(yard)
    assert second["previous"] == first["version"]
    assert len(ChunkDatabase(second["database"])) == 30
    assert len(second["embeddings"]) == 2
    found = read_manifest(f"{second['embeddings'][1]}/manifest.json")
    assert found is not None
    assert found[0].metrics["chunks"] == 15, "only those of the new documents"
    found = read_manifest(f"{second['index']}/manifest.json")
    assert found is not None
    assert found[0].metrics["vectors"] == 30
    assert found[0].metrics["drift"]["after"]["recall"] == 1.0
    assert (Path(first["index"]) / "added.faissindex").read_bytes() == before
    assert refresh(yard) == second
