"""An index that grows with its corpus: what is made again, and what is taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.recipes.corpus_versions import CorpusVersion
from flows.recipes.recipe import Recipe, parse_recipe
from flows.recipes.refresh import plan_refresh
from flows.recipes.refresh_retro import RetroRefresh, plan_retro, publish_retro
from tests.flows.recipes.test_refresh import TOKENIZE, carry_out, write
from trainyard.artifacts import store
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

RETRO = """[retro_db]
retro_index_ntrain = 100
retro_bert_tokenizer_type = "BertWordPieceLowerCase"
retro_bert_vocab_file = "vocab.txt"
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text("{}")
    write(str(tmp_path), "b", "1 2 3")
    return str(tmp_path)


def recipe(root: str, retro: str = RETRO, keys: str | None = None) -> Recipe:
    keys = f'encoder = "{root}/bert"\n' if keys is None else keys
    text = f'corpus = ["{root}/in/*.jsonl"]\n{keys}{TOKENIZE}{retro}'
    return parse_recipe(text, "web.toml", f"{root}/yard")


def corpus(root: str) -> CorpusVersion:
    work = plan_refresh(recipe(root))
    if work.is_news:
        carry_out(recipe(root), work)
    return work.version


def refresh(root: str, retro: str = RETRO) -> RetroRefresh:
    written = recipe(root, retro)
    work = plan_retro(written, corpus(root))
    if work.jobs:
        publish_retro(written, work)
    return work


def stages(work: RetroRefresh) -> list[str]:
    return [job.stage for job in work.jobs]


def test_a_version_is_built_then_grows_and_otherwise_stays(root: str) -> None:
    first = refresh(root)
    built = ["retro_db", "retro_embed", "faiss_train", "retro_embed", "faiss_add"]
    assert stages(first) == built
    assert first.jobs[0].document["retro_gpt_split"] == "100,0,0"
    assert refresh(root).jobs == ()

    write(root, "a", "4 5")  # comes before b in the corpus, and after it in the index
    second = refresh(root)
    assert stages(second) == ["retro_db", "retro_embed", "faiss_add"]
    database, embed, add = (job.document for job in second.jobs)
    assert database["data_path"][0] == first.version.data_path[0]
    assert len(database["data_path"]) == 2
    assert database["retro_base_db"] == embed["retro_base_db"] == first.version.database
    assert add["index"] == first.version.index
    assert add["embeddings"] == [*first.version.embeddings, embed["output_dir"]]
    assert second.version.previous == first.version.version
    assert second.version.index != first.version.index
    assert refresh(root).jobs == ()


def test_an_index_is_built_anew_once_a_source_is_gone_or_an_option_changes(root: str) -> None:
    write(root, "a", "4 5")
    refresh(root)
    store.delete(f"{root}/in/a.jsonl")
    assert "faiss_train" in stages(refresh(root))
    changed = refresh(root, RETRO.replace("= 100", "= 50"))
    assert "faiss_train" in stages(changed)
    assert changed.version.previous is None


def test_what_cannot_grow_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match='give encoder = "FOLDER" above the tables'):
        plan_retro(recipe(root, keys=""), corpus(root))
    two = TOKENIZE + 'json_keys = ["text", "title"]\n'
    text = f'corpus = ["{root}/in/*.jsonl"]\nencoder = "{root}/bert"\n{two}{RETRO}'
    with pytest.raises(ConfigError, match="an index is of one text a document"):
        plan_retro(parse_recipe(text, "web.toml", f"{root}/yard"), corpus(root))
    work = plan_retro(recipe(root), corpus(root))
    publish_retro(recipe(root), work)
    with pytest.raises(InfrastructureError, match="another run published first"):
        publish_retro(recipe(root), work)
    store.write_bytes(f"{root}/yard/web/retro/current.json", b'{"format_version": 1}')
    with pytest.raises(ArtifactError, match="not a pointer to an index that grows"):
        plan_retro(recipe(root), corpus(root))
