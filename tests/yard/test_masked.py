"""Raw text to a trained BERT or T5 by one recipe, and nothing to do the second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

RECIPE = """
[collect]
max_size_mb = 0.5
num_shards = 2
[train_tokenizer]
vocab_size = 400
[tokenize]
lang = "none"
[pretrain]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 64
max_position_embeddings = 64
micro_batch_size = 4
train_iters = 4
lr = 1e-3
split = "90,10,0"
eval_iters = 1
eval_at_start = true
num_threads = 1
"""


OF_T5 = RECIPE.replace('lang = "none"', 'lang = "none"\nvocab_extra_ids = 100')


@pytest.mark.parametrize(("family", "text"), [("bert", RECIPE), ("t5", OF_T5)])
def test_a_model_from_nothing_and_again(
    tmp_path: Path, prefect_api: dict[str, str], module_cache: str, family: str, text: str
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": module_cache})
    recipe = yard.recipe(text)
    first = yard.run("-m", f"flows.pretrain_{family}", str(recipe))
    assert first.status == 0, first.err
    assert set(first.states().values()) == {"done"}
    assert "validation loss: from " in first.err
    assert first.out.strip().endswith("card.html")
    again = yard.run("-m", f"flows.pretrain_{family}", str(recipe))
    assert again.status == 0, again.err
    assert set(again.states().values()) == {"reused"}
