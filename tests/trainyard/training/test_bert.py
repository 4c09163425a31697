"""A BERT trained on sentences: options that apply, its losses in ledger and log, and a resumed run
equal to an undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.blame.config import BlameConfig
from stages.blame.run_description import describe
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.training import masked_runs
from tests.trainyard.training.masked_runs import SMALL, random_corpus
from tests.trainyard.training.resumed_runs import RUN, certificate, digest, ledger
from trainyard.checkpoint.model import load_model
from trainyard.config import from_dict
from trainyard.errors import ConfigError, DataError
from trainyard.training.options.pretrain import PretrainConfig

OPTIONS: dict[str, Any] = {**SMALL, "model_type": "bert"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return random_corpus(tmp_path_factory.mktemp("bert"), fewest=2)


def run(corpus: dict[str, str], save: Path, **options: Any) -> str:
    return masked_runs.run(corpus, save, **{**OPTIONS, **options})


@pytest.mark.slow
def test_a_killed_and_resumed_bert_equals_an_undisturbed_one(
    corpus: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "whole") == "finished"
    printed = capsys.readouterr().out
    assert run(corpus, tmp_path / "parts", dies_after=4) == "died"
    assert run(corpus, tmp_path / "parts") == "finished"
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")

    last = ledger(tmp_path / "whole")[-1]
    assert last["more_losses"].keys() == last["more_validation_losses"].keys() == {"sop loss"}
    assert re.search(r"\| lm loss: \S+ \| sop loss: \S+ \| loss scale: ", printed)
    assert re.search(
        r"loss at iteration 4 \| lm loss value: \S+ \| lm loss PPL: \S+ \| sop loss value: \S+ \|",
        printed,
    )


@pytest.mark.slow
def test_without_a_binary_head_there_is_one_loss_and_a_blend_of_sentences_trains(
    corpus: dict[str, str], tmp_path: Path
) -> None:
    tokens = corpus["tokens"]
    options = {"bert_binary_head": False, "data_path": ["0.3", tokens, "0.7", tokens]}
    assert run(corpus, tmp_path / "run", mask_prob=0.3, short_seq_prob=0.5, **options) == "finished"
    assert "more_losses" not in ledger(tmp_path / "run")[-1]


def config(**options: Any) -> PretrainConfig:
    document = {**RUN, **OPTIONS, "data_path": ["x"], "save": "y", "vocab_file": "v", **options}
    return from_dict(PretrainConfig, document)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_attention_mask": True}, "--reset-attention-mask does not apply with --model-type"),
        ({"mock_data": True, "data_path": []}, "--mock-data does not apply with --model-type bert"),
        ({"context_parallel_size": 2}, r"--context-parallel-size \(2\) does not apply with"),
        ({"calculate_per_token_loss": True}, "the sop loss of --model-type bert has none"),
        ({"mask_prob": 0.2, "model_type": "gpt"}, "--mask-prob and --short-seq-prob do not apply"),
        ({"bert_binary_head": False, "model_type": "gpt"}, "only applies with --model-type bert"),
        ({"model_type": "t4"}, "model_type is 't4'; choose one of 'gpt', 'bert'"),
    ],
)
def test_options_of_another_family_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


@pytest.mark.slow
def test_text_that_was_not_split_is_refused(corpus: dict[str, str], tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "whole", [[np.arange(5, 40)] for _ in range(30)])
    with pytest.raises(DataError, match="was the text split by --split-sentences"):
        run({**corpus, "tokens": str(tokens)}, tmp_path / "run")


@pytest.mark.slow
def test_stages_for_the_samples_of_a_gpt_say_that_this_is_a_bert(
    corpus: dict[str, str], tmp_path: Path
) -> None:
    assert run(corpus, tmp_path / "run") == "finished"
    found = certificate(tmp_path / "run", data_path=[corpus["tokens"]])
    assert found.is_proven, found.checks
    assert "--model-type bert: the order of samples of sentences" in str(found)
    blame = from_dict(BlameConfig, {"load": str(tmp_path / "run"), "step": 1})
    with pytest.raises(ConfigError, match="is a run of --model-type bert, whose samples are"):
        describe(blame)
    with pytest.raises(ConfigError, match="holds a bert, and this needs a gpt"):
        load_model(str(tmp_path / "run"), model_type="gpt")
    hidden = load_model(str(tmp_path / "run")).model.encode(torch.tensor([[2, 9, 10, 3]]))
    assert hidden.shape == (1, 4, 16)
