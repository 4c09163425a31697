"""stages.finetune: a checkpoint and instruction data are enough; the rest is as in pretrain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.pretrain.checkpoint_options import complete
from stages.pretrain.config import PretrainConfig
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.tokenizers.chat.chats import pair, write_folder
from tests.trainyard.training.resumed_runs import RUN, leg
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError

TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'user' %}Q: {{ turn.content }}\nA:"
    "{% else %} {{ turn.content }}\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tokens, a tokenizer without a template, a template, and conversations."""
    folder = tmp_path_factory.mktemp("finetune")
    tokenizer = write_folder(folder / "tokenizer")
    (folder / "chat.jinja").write_text(TEMPLATE)
    lines = [json.dumps({"messages": pair(f"What is {n}?", "Hello")}) for n in range(40)]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    options = {
        **{key: value for key, value in RUN.items() if key not in ("vocab_size", "tokenizer_type")},
        "num_layers": 2,
        "seq_length": 32,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": tokenizer,
        "hidden_dropout": 0.0,
        "train_iters": 1,
        "eval_iters": 0,
        "data_path": [str(folder / "text")],
        "save": str(folder / "base"),
    }
    write_tokens(folder / "text", [[[*range(30, 90), 2]]] * 20)
    assert leg(options) == "finished"
    return folder


def given(base: Path, **more: Any) -> dict[str, Any]:
    return {
        "load": str(base / "base"),
        "save": str(base / "tuned"),
        "data_path": [str(base / "chat.jsonl")],
        "chat_template": str(base / "chat.jinja"),
        "sft_packing": "lines",
        "split": "80,20,0",
        "micro_batch_size": 2,
        "train_iters": 8,
        "lr": 0.01,
        "eval_iters": 1,
        "eval_interval": 4,
        "dataloader_type": "cyclic",
        "device": "cpu",
        **more,
    }


def test_the_checkpoint_brings_the_model_and_the_tokenizer(base: Path) -> None:
    options = complete(given(base))
    assert (options["sft"], options["finetune"]) == (True, True)
    assert (options["num_layers"], options["hidden_size"], options["seq_length"]) == (2, 32, 32)
    assert options["tokenizer_type"] == "SFTTokenizer"
    assert options["sft_tokenizer_prompt_format"] == "default"
    config = from_dict(PretrainConfig, options)
    assert config.model.hidden_dropout == 0.0
    assert leg(options) == "finished"
    lines = [json.loads(line) for line in (base / "tuned" / "ledger.jsonl").open()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert losses[-1] < losses[0]
    # What was tuned carries its template, and can be tuned again without naming one.
    again = complete({"load": str(base / "tuned")})
    assert again["tokenizer_type"] == "SFTTokenizer"
    assert again["chat_template"].endswith("chat_template.jinja")


def test_given_options_win_and_a_table_of_positions_keeps_its_length(base: Path) -> None:
    options = complete(given(base, seq_length=16, hidden_dropout=0.1, sft=False))
    assert (options["seq_length"], options["max_position_embeddings"]) == (16, 32)
    assert (options["hidden_dropout"], options["sft"]) == (0.1, False)
    plain = complete({"load": str(base / "base")})  # questions need no template
    assert plain["tokenizer_type"] == "HuggingFaceTokenizer"


def test_what_cannot_be_tuned_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load is required: the checkpoint to tune"):
        complete({"data_path": ["x.jsonl"]})
    with pytest.raises(ArtifactError, match="no checkpoint there"):
        complete({"load": str(tmp_path)})
