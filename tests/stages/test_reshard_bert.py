"""The published BERT-345M archives through reshard, and on into a training: whole vocabularies, as
narrow models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.reshard.config import ReshardConfig
from stages.reshard.run import run
from tests.stages.directly import run_directly
from tests.trainyard.conversion.megatron.bert_of_2019 import ROWS_OF, TOKENS_OF, save_oldest
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.training.masked_runs import SMALL, SPECIAL
from tests.trainyard.training.resumed_runs import go
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.model import load_model
from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.init import init_parameters

NARROW: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
CASED = "BertWordPieceCase"


def archive(folder: Path, kind: str) -> dict[str, Any]:
    """Write such an archive and its vocabulary; the options that reshard it."""
    config = BertConfig(**NARROW, seq_length=512)
    model = BertModel(config, ROWS_OF[kind])
    init_parameters(model, 3)
    ours = {name: tensor.detach() for name, tensor in model.named_parameters()}
    save_oldest(folder / "archive", config, ROWS_OF[kind], ours)
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), TOKENS_OF[kind]))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return {
        "load_dir": str(folder / "archive"),
        "save_dir": str(folder / "run"),
        "num_attention_heads": NARROW["num_attention_heads"],
        "tokenizer_type": kind,
        "vocab_file": str(folder / "vocab.txt"),
    }


@pytest.mark.parametrize("kind", ROWS_OF)
def test_the_published_berts_have_the_tokens_of_their_vocabulary(tmp_path: Path, kind: str) -> None:
    run_directly(ReshardConfig, run, **archive(tmp_path, kind))
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        assert checkpoint.config["padded_vocab_size"] == ROWS_OF[kind]
        assert checkpoint.config["vocab_size"] == TOKENS_OF[kind]
    assert load_model(str(tmp_path / "run")).tokenizer.vocab_size == TOKENS_OF[kind]


def test_extra_ids_that_are_asked_for_need_rows(tmp_path: Path) -> None:
    options = archive(tmp_path, CASED)
    with pytest.raises(ConfigError, match=r"29096 tokens, but .* has rows for 29056"):
        run_directly(ReshardConfig, run, **options, vocab_extra_ids=100)
    run_directly(ReshardConfig, run, **options, vocab_extra_ids=0)
    assert load_model(str(tmp_path / "run")).tokenizer.vocab_size == TOKENS_OF[CASED]


@pytest.mark.slow
def test_the_published_cased_bert_is_trained_on(tmp_path: Path) -> None:
    options = archive(tmp_path, CASED)
    run_directly(ReshardConfig, run, **options)
    random = np.random.RandomState(1)
    tokens = [[random.randint(5, TOKENS_OF[CASED], 8) for _ in range(3)] for _ in range(60)]
    write_tokens(tmp_path / "tokens", tokens)
    given = SMALL | NARROW | {"model_type": "bert", "tokenizer_type": CASED}
    given |= {"vocab_file": options["vocab_file"], "seq_length": 512, "train_iters": 2}
    given["make_vocab_size_divisible_by"] = 128
    given |= {"load": str(tmp_path / "run"), "finetune": True}
    with pytest.raises(ConfigError, match=r"29056 rows .*; use --vocab-extra-ids 0, as this"):
        go(str(tmp_path / "tokens"), tmp_path / "wrong", **given)
    done = go(str(tmp_path / "tokens"), tmp_path / "tuned", **given, vocab_extra_ids=0)
    assert done == "finished"
