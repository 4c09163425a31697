"""Values in recipes of the flows that came last, BERT's, T5's and Retro's: refused in words, and
without a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flows.recipes.masked import masked_jobs
from flows.recipes.recipe import parse_recipe
from flows.recipes.retro import retro_training
from tests.flows.processes import ROOT
from trainyard.config_text import parse_document
from trainyard.corpus.sentences import model_folder
from trainyard.errors import ConfigError

SECRET = "hunter2"
URL = f"s3://key:{SECRET}@host/x"
RETRO = "retro_quickstart"

CASES: list[tuple[str, str, str, Any]] = [
    (RETRO, "", "encoder", URL),
    (RETRO, "", "encoder", f"https://host/x?{SECRET}"),
    (RETRO, "", "tokens", f"https://host/x#{SECRET}"),
    (RETRO, "", "preset", "a\0b"),
    (RETRO, "", URL, 1),
    (RETRO, "retro_db", URL, 1),
    (RETRO, "retro_db", "workers", URL),
    (RETRO, "retro_db", "workers", [f"https://host/x?{SECRET}"]),
    (RETRO, "retro_db", "retro_index_ntrain", -1),
    (RETRO, "retro_db", "retro_index_ntrain", 2**70),
    (RETRO, "retro_embed", "load", [URL]),
    (RETRO, "faiss_train", "retro_index_str", URL),
    (RETRO, "faiss_train", "retro_index_train_load_fraction", 10**400),
    (RETRO, "faiss_train", "output_dir", "/victim"),
    (RETRO, "faiss_query", "retro_block_size", float("nan")),
    (RETRO, "bert", "load", "a\0b"),
    (RETRO, "pretrain", "retro_train_neighbors", "/victim"),
    (RETRO, "pretrain", "retro_num_neighbors", 0),
    (RETRO, "pretrain", "lr", 10**400),
    ("bert_quickstart", "pretrain", "wandb_project", URL),
    ("t5_quickstart", "pretrain", "load", URL),
    ("t5_quickstart", "pretrain", "lr", float("inf")),
    ("t5_quickstart", "pretrain", "load", "a\0b"),
]


def derive(name: str, text: str, yard: str) -> None:
    """The jobs of a recipe, before any of them runs."""
    recipe = parse_recipe(text, f"{name}.toml", yard)
    if name == RETRO:
        retro_training(recipe)
    else:
        masked_jobs(recipe, name.partition("_")[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]} {case[2]} {case[3]!r:.40}")
def test_a_value_is_refused_before_any_work_and_without_its_password(
    case: tuple[str, str, str, Any], tmp_path: Path
) -> None:
    name, table, key, value = case
    document = parse_document((ROOT / f"recipes/{name}.toml").read_text(), ".toml", name)
    (document.setdefault(table, {}) if table else document)[key] = value
    with pytest.raises(ConfigError) as caught:
        derive(name, tomli_w.dumps(document), str(tmp_path))
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("lang", ["x" * 5000, "../../etc", "a\0b", "", "a/b", "english\n"])
def test_a_language_is_a_name_and_no_path(lang: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a language"):
        model_folder(lang)
