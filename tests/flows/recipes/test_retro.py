"""A recipe becomes the jobs that build Retro's neighbours."""

from __future__ import annotations

import importlib.util

import pytest

from flows.recipes.inputs import check_packages
from flows.recipes.recipe import parse_recipe, read_recipe
from flows.recipes.retro import RetroJobs, retro_jobs, retro_training
from tests.flows.processes import ROOT
from trainyard.errors import ConfigError

QUICKSTART = ROOT / "recipes/retro_quickstart.toml"


def jobs(text: str | None = None) -> RetroJobs:
    text = QUICKSTART.read_text() if text is None else text
    return retro_jobs(parse_recipe(text, "retro.toml", "/y"))


def with_encoder() -> str:
    """The quick start's recipe with a given encoder."""
    text = QUICKSTART.read_text()
    begin, end = text.index("[bert_tokenizer]"), text.index("[retro_db]")
    vocabulary = (
        'retro_bert_tokenizer_type = "BertWordPieceCase"\nretro_bert_vocab_file = "v.txt"\n'
    )
    after = text[end:].replace("[retro_db]\n", f"[retro_db]\n{vocabulary}")
    return 'encoder = "minilm"\n' + text[:begin] + after


def indexed(index: str, *more: str) -> str:
    """The quick start's recipe with an index."""
    lines = ["[faiss_train]", f'retro_index_str = "{index}"', *more]
    text = QUICKSTART.read_text()
    assert "[faiss_train]" not in text
    return "\n".join([text, *lines, ""])


def test_chunks_that_train_an_index_are_embedded_for_it() -> None:
    every = jobs(indexed("IVF256,SQ8"))
    assert every.embed_sampled.document["retro_index_str"] == "IVF256,SQ8"
    assert "retro_index_str" not in every.embed_train.document


def test_jobs_come_in_the_order_in_which_they_run() -> None:
    names = [job.name for job in jobs().all()]
    tokens = ["collect", "train_tokenizer", "tokenize-train-00000", "tokenize-train-00001", "merge"]
    bert = ["bert_tokenizer", "bert-tokenize-train-00000", "bert-tokenize-train-00001"]
    index = ["retro_db", "embed-sampled", "faiss_train", "embed-train", "faiss_add"]
    splits = [
        f"{what}-{split}" for split in ("train", "valid") for what in ("embed-samples", "query")
    ]
    assert names == [*tokens, *bert, "bert-merge", "bert", *index, *splits]


def test_each_output_is_somebodys_input_and_no_two_jobs_share_one() -> None:
    every = jobs()
    written = [str(job.output.url) for job in every.all() if job.output]
    assert len(set(written)) == len(written) == len(every.all())
    read = {str(value) for job in every.all() for value in job.document.values()}
    read |= {str(v) for job in every.all() for v in job.document.get("data_path", ())}
    ends = {str(split.query.output.url) for split in every.splits if split.query.output}
    parts = {one for one in written if "/parts/" in one or one.endswith(("/corpus", "/tokenizer"))}
    assert set(written) - ends - parts - read == set()


def test_a_recipe_whose_packages_are_missing_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = parse_recipe(QUICKSTART.read_text(), "retro.toml", "/y")
    every = retro_training(recipe).all()
    check_packages(recipe, every)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "faiss" else find(n))
    with pytest.raises(ConfigError, match=r"retro.toml: faiss_train, faiss_add, faiss_query need "):
        check_packages(recipe, every)
    check_packages(recipe, [job for job in every if not job.stage.startswith("faiss")])


def test_the_card_shows_what_the_training_retrieves() -> None:
    report = retro_training(parse_recipe(QUICKSTART.read_text(), "retro.toml", "/y")).report
    assert report.document["retro_neighbors"] == "/y/retro/retro/query/train"


def test_the_training_decides_which_samples_are_queried() -> None:
    train, valid = jobs().splits
    for job in (train.embed, train.query):
        assert job.document["train_iters"] == 150
        assert job.document["global_batch_size"] == 8
        assert job.document["seq_length"] == 256
        assert "lr" not in job.document
    assert valid.query.document["retro_query_split"] == "valid"
    text = QUICKSTART.read_text().replace("eval_iters = 4\n", "eval_iters = 0\n")
    text = text.replace("eval_at_start = true\n", "")
    assert [split.query.name for split in jobs(text).splits] == ["query-train"]


def test_a_given_encoder_is_not_trained() -> None:
    every = jobs(with_encoder())
    assert (every.bert_corpus, every.bert) == (None, None)
    assert every.embed_train.document["load"] == "minilm"
    for job in (every.database, every.embed_train):
        assert job.document["retro_bert_vocab_file"] == "v.txt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: 'encoder = "x"\n' + text, r"encoder \(x\) is given, .*leave \[bert_tok"),
        (lambda text: with_encoder().partition("\n")[2], r"chunks need a BERT that embeds them"),
        (lambda text: text.replace("[retro_embed]", '[retro_embed]\nload = "x"'), "decided by"),
        (lambda text: text.replace("[bert]", '[bert]\nmodel_type = "gpt"'), "decided by the flow"),
        (lambda _: indexed("IVF257,SQ8"), r"257 lists need 10,023 .* \[retro_db\] .*10000 gives"),
        (
            lambda _: indexed("IVF2,SQ8", "retro_index_ntrain = 77"),
            r"-ntrain of faiss_train gives 77",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(change: object, message: str) -> None:
    assert callable(change)
    with pytest.raises(ConfigError, match=message):
        jobs(change(QUICKSTART.read_text()))


def test_chunks_are_embedded_by_the_bert_from_where_it_is_saved() -> None:
    recipe = read_recipe(str(QUICKSTART), "/y").with_options({"bert": {"save": "/elsewhere"}})
    built = retro_training(recipe).neighbors
    assert built.bert is not None
    assert built.bert.document["save"] == "/elsewhere"
    assert built.embed_train.document["load"] == "/elsewhere"


def test_the_training_reads_what_the_other_jobs_made() -> None:
    every = retro_training(read_recipe(str(QUICKSTART), "/y"))
    document = every.pretrain.document
    first, *_, before_last, last = (job.name for job in every.all())
    assert (first, before_last, last) == ("plan", "pretrain", "report")
    assert document["model_type"] == every.plan.document["model_type"] == "retro"
    assert document["retro_db"] == every.neighbors.database.document["output_dir"]
    for split in every.neighbors.splits:
        name = f"retro_{split.query.document['retro_query_split']}_neighbors"
        assert document[name] == split.query.document["output_dir"]
    assert every.report.document["checkpoint"] == document["save"]
