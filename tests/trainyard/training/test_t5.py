"""A T5 trained on sentences: options that apply, and a resumed run equal to an undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.training import masked_runs
from tests.trainyard.training.masked_runs import SMALL, WORDS, random_corpus
from tests.trainyard.training.resumed_runs import RUN, certificate, digest, ledger
from trainyard.checkpoint.model import load_model
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.models.t5.config import T5Config
from trainyard.training.options.pretrain import PretrainConfig

OPTIONS: dict[str, Any] = {
    **SMALL,
    "model_type": "t5",
    "decoder_num_layers": 1,
    "decoder_seq_length": 16,
    "vocab_extra_ids": 20,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return random_corpus(tmp_path_factory.mktemp("t5"), fewest=1)


def run(corpus: dict[str, str], save: Path, **options: Any) -> str:
    return masked_runs.run(corpus, save, **{**OPTIONS, **options})


@pytest.mark.slow
def test_a_killed_and_resumed_t5_equals_an_undisturbed_one(
    corpus: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "whole") == "finished"
    printed = capsys.readouterr().out
    assert run(corpus, tmp_path / "parts", dies_after=4) == "died"
    assert run(corpus, tmp_path / "parts") == "finished"
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    assert "more_losses" not in ledger(tmp_path / "whole")[-1]
    assert re.search(r"\| lm loss: \S+ \| loss scale: ", printed)

    found = certificate(tmp_path / "whole", data_path=[corpus["tokens"]])
    assert found.is_proven, found.checks
    loaded = load_model(str(tmp_path / "whole"), model_type="t5")
    assert isinstance(loaded.config, T5Config)
    tokens, decoder_tokens = torch.tensor([[9, 10, 3]]), torch.tensor([[2]])
    assert loaded.model(tokens, decoder_tokens).shape == (1, 1, len(WORDS) + 20)


@pytest.mark.slow
def test_a_t5_with_relative_positions_trains_on_a_blend(
    corpus: dict[str, str], tmp_path: Path
) -> None:
    tokens = corpus["tokens"]
    options = {
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "recompute_granularity": "full",
        "data_path": ["0.3", tokens, "0.7", tokens],
    }
    assert run(corpus, tmp_path / "run", mask_prob=0.3, short_seq_prob=0.5, **options) == "finished"


@pytest.mark.slow
def test_a_tokenizer_without_sentinels_is_refused(corpus: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --vocab-extra-ids 100"):
        run(corpus, tmp_path / "run", vocab_extra_ids=0)


DOCUMENT: dict[str, Any] = {**RUN, "data_path": ["x"], "save": "y", "vocab_file": "v"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_attention_mask": True}, "--reset-attention-mask does not apply with --model-type"),
        ({"context_parallel_size": 2}, r"--context-parallel-size \(2\) does not apply with"),
        (
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "decoder_seq_length": 17,
            },
            r"--decoder-seq-length \(17\) must be divisible by --tensor-model-parallel-size \(2\)",
        ),
        (
            {"position_embedding_type": "relative", "pipeline_model_parallel_size": 3},
            r"--pipeline-model-parallel-size \(3\): every layer of a T5 with",
        ),
        (
            {"pipeline_model_parallel_size": 2},
            r"encoder's layers \(2\) and then the decoder's \(1\), 3 in all: --num-layers \(3\)",
        ),
        (
            {"position_embedding_type": "relative", "attention_backend": "flash"},
            "--attention-backend flash adds nothing to scores",
        ),
        (
            {"decoder_num_layers": 3, "model_type": "gpt"},
            r"only applies with --model-type t5 \(pretrain_t5.py\)",
        ),
        (
            {"position_embedding_type": "relative", "model_type": "bert"},
            "--position-embedding-type relative is for --model-type t5, and this is a bert",
        ),
    ],
)
def test_options_that_do_not_fit_a_t5_are_refused(options: dict[str, Any], message: str) -> None:
    others = () if "model_type" not in options else ("decoder_num_layers", "decoder_seq_length")
    options = {name: x for name, x in OPTIONS.items() if name not in others} | options
    with pytest.raises(ConfigError, match=message):
        from_dict(PretrainConfig, DOCUMENT | options)
