"""How many <extra_id_N> a tokenizer of word pieces has: given, by its type, or by the rows of a
model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainyard.tokenizers.kinds import carried
from tests.trainyard.tokenizers.test_types import wordpiece
from trainyard.config import digest_relevant
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig, of_manifest
from trainyard.tokenizers.registry import build_fitting


def test_none_are_added_where_none_are_asked_for(tmp_path: Path) -> None:
    none = wordpiece(tmp_path, "BertWordPieceCase", vocab_extra_ids=0)
    assert (none.vocab_size, none.extra_ids) == (11, ())


@pytest.mark.parametrize(("given", "number", "stored"), [(None, 100, 0), (0, 0, -1), (2, 2, 2)])
def test_extra_ids_of_a_carried_tokenizer_are_those_given(
    tmp_path: Path, given: int | None, number: int, stored: int
) -> None:
    """Documents hold 0 for an option left out, as those of earlier versions do."""
    cased = wordpiece(tmp_path, "BertWordPieceCase", vocab_extra_ids=given)
    (tmp_path / "again").mkdir()
    again = carried(cased, tmp_path / "again")
    document = json.loads((tmp_path / "again" / DESCRIPTION).read_text())
    assert (len(again.extra_ids), document["vocab_extra_ids"]) == (number, stored)
    assert again.config.vocab_extra_ids == given
    options = digest_relevant(cased.config)
    url = str(tmp_path / "vocab.txt")
    assert of_manifest(options, [url], "manifest").vocab_extra_ids == given
    lower = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=url, vocab_extra_ids=0
    )
    assert digest_relevant(lower)["vocab_extra_ids"] == 0


@pytest.mark.parametrize(
    ("rows", "number"), [(10, 111), (11, 11), (64, 11), (110, 11), (111, 111), (128, 111)]
)
def test_extra_ids_by_default_need_rows_of_the_model(
    tmp_path: Path, rows: int, number: int
) -> None:
    vocab_file = str(tmp_path / "vocab.txt")
    config = wordpiece(tmp_path, "BertWordPieceCase").config
    assert config.vocab_file == vocab_file
    assert build_fitting(config, rows).vocab_size == number
    assert build_fitting(replace(config, vocab_extra_ids=100), rows).vocab_size == 111
