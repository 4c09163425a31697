"""Raw text to a Retro that reads its neighbours by one recipe; nothing to do the second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(900)]

MODEL = """
num_layers = 2
hidden_size = 32
num_attention_heads = 2
micro_batch_size = 4
global_batch_size = 4
lr = 1e-3
split = "80,20,0"
eval_iters = 1
num_threads = 1
"""
RECIPE = f"""
[collect]
max_size_mb = 0.3
num_shards = 1
[train_tokenizer]
vocab_size = 400
[tokenize]
append_eod = true
[bert_tokenizer]
vocab_size = 300
[bert_tokenize]
lang = "none"
[bert]
seq_length = 64
max_position_embeddings = 64
train_iters = 2
{MODEL}
[retro_db]
retro_index_ntrain = 200
retro_gpt_split = "80,20,0"
[retro_embed]
retro_bert_max_chunk_length = 64
[faiss_query]
retro_query_num_neighbors_query = 20
retro_query_num_neighbors_save = 2
[pretrain]
seq_length = 128
train_iters = 4
eval_at_start = true
retro_cross_attention_layers = [2]
{MODEL}"""


def test_a_retro_from_nothing_and_again(
    tmp_path: Path, prefect_api: dict[str, str], module_cache: str
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": module_cache})
    recipe = yard.recipe(RECIPE)
    built = yard.run("-m", "flows.build_retro", recipe)
    assert built.status == 0, built.err
    assert set(built.states().values()) == {"done"}
    assert Path(built.out.strip()) == yard.tiny / "retro"

    trained = yard.run("-m", "flows.pretrain_retro", recipe)
    assert trained.status == 0, trained.err
    done = {job for job, state in trained.states().items() if state == "done"}
    assert done == {"plan", "pretrain", "report"}
    assert "validation loss: from " in trained.err
    database = json.loads((yard.tiny / "retro/db/manifest.json").read_text())["output_digest"]
    checkpoint = next(yard.tiny.glob("checkpoint/iter_*/config.json")).read_text()
    assert database in checkpoint

    again = yard.run("-m", "flows.pretrain_retro", recipe)
    assert set(again.states().values()) == {"reused"}, again.err
