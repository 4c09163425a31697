"""A recipe becomes the jobs of a flow that trains a BERT."""

from __future__ import annotations

import pytest

from flows.recipes.masked import MaskedJobs, masked_jobs
from flows.recipes.recipe import parse_recipe
from trainyard.errors import ConfigError

TINY = """
[collect]
num_shards = 2
[train_tokenizer]
vocab_size = 500
[tokenize]
lang = "none"
[pretrain]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 32
micro_batch_size = 2
global_batch_size = 4
train_iters = 5
lr = 1e-3
"""


def jobs(text: str = TINY) -> MaskedJobs:
    return masked_jobs(parse_recipe(text, "tiny.toml", "/y"), "bert")


def test_jobs_come_in_the_order_in_which_they_run() -> None:
    tokens = ["tokenize-train-00000", "tokenize-train-00001", "merge"]
    names = ["plan", "collect", "train_tokenizer", *tokens, "pretrain", "report"]
    assert [job.name for job in jobs().all()] == names


def test_the_flow_decides_about_sentences_word_pieces_and_the_family() -> None:
    every = jobs()
    assert every.corpus.train_tokenizer is not None
    assert every.corpus.train_tokenizer.document["algorithm"] == "wordpiece"
    assert all(job.document["split_sentences"] is True for job in every.corpus.tokenize)
    assert every.pretrain.document["model_type"] == every.plan.document["model_type"] == "bert"
    assert every.pretrain.document["vocab_file"] == "/y/tiny/tokenizer/vocab.txt"
    assert every.pretrain.document["data_path"] == ["/y/tiny/tokens/corpus_text_sentence"]
    for key, table in (("algorithm", "train_tokenizer"), ("split_sentences", "tokenize")):
        written = TINY.replace(f"[{table}]", f"[{table}]\n{key} = 'bpe'")
        with pytest.raises(ConfigError, match=rf"\[{table}\]: {key} is decided by the flow"):
            jobs(written)


@pytest.mark.parametrize(
    ("lower_case", "kind", "tokens"), [("true", "LowerCase", 500), ("false", "Case", 600)]
)
def test_the_tokenizer_has_the_case_of_the_trained_one(
    lower_case: str, kind: str, tokens: int
) -> None:
    text = TINY.replace("vocab_size = 500", f"vocab_size = 500\nlower_case = {lower_case}")
    every = jobs(text)
    assert every.pretrain.document["tokenizer_type"] == f"BertWordPiece{kind}"
    assert every.plan.document["vocab_size"] == tokens


def test_a_t5_has_the_sentinels_of_its_tokens() -> None:
    text = TINY.replace("[tokenize]", "[tokenize]\nvocab_extra_ids = 100")
    every = masked_jobs(parse_recipe(text, "tiny.toml", "/y"), "t5")
    assert every.pretrain.document["model_type"] == "t5"
    assert every.pretrain.document["vocab_extra_ids"] == 100
    assert every.plan.document["vocab_size"] == 600


def test_existing_tokens_need_no_text_to_evaluate_on() -> None:
    _, _, model = TINY.partition("[pretrain]")
    named = '[tokenize]\ntokenizer_type = "BertWordPieceCase"\nvocab_file = "v.txt"\n'
    every = jobs(f'tokens = "s3://b/t"\n{named}[plan]\nvocab_size = 9\n[pretrain]{model}')
    assert [job.name for job in every.all()] == ["plan", "pretrain", "report"]
    assert every.pretrain.document["data_path"] == ["s3://b/t"]
