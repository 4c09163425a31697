"""Instruction data in training: a packed batch costs what its conversations cost one by one, only
answers are learnt, and a run resumes to the same bits."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.blame.config import BlameConfig
from stages.blame.run_description import describe
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.run import run as run_evaluate
from stages.reshard.config import ReshardConfig
from stages.reshard.run import run as run_reshard
from stages.runtime.context import StageRun
from tests.stages.directly import run_directly
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.tokenizers.chat.chats import pair, write_folder
from tests.trainyard.training.resumed_runs import RUN, certificate, ledger, leg
from trainyard.checkpoint.model import load_model
from trainyard.config import from_dict
from trainyard.datasets.fine_tuning.config import SftConfig
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.sft import SFTDataset, SftFormat
from trainyard.datasets.fine_tuning.tokenize import IGNORED, InstructionTokenizer
from trainyard.datasets.loader import SAMPLE_IDS, Batch, collate
from trainyard.errors import ConfigError, DataError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.parallel.groups import ALONE
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer
from trainyard.training.loop.data import build_run_data
from trainyard.training.loop.length import length_of
from trainyard.training.loop.microbatch import Preparation
from trainyard.training.options.pretrain import PretrainConfig

LENGTH = 96
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHATS = [
    pair("What is the weather?", "Hello."),
    [*pair("Hi", "Ho"), *pair("And?", "What is it?")],
    pair("Hello", "the weather"),
    pair("user", "What?"),
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A file of conversations, and the folder of a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("sft")
    tokenizer = write_folder(folder / "tokenizer", chat_template=TEMPLATE)
    lines = [json.dumps({"messages": one}) for one in CHATS * 3]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "chat.jsonl"), tokenizer


def packed(chat: tuple[str, str], name: str = "default") -> tuple[Batch, int]:
    """Samples that several lines share, and the size of the vocabulary."""
    tokenizer: Any = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SFTTokenizer", tokenizer_model=chat[1], sft_tokenizer_prompt_format=name
        )
    )
    form = SftFormat(seq_length=LENGTH, eod=tokenizer.eod, pad=tokenizer.pad, packing="lines")
    file, options = ConversationFile(chat[0]), SftConfig(sft=True)
    dataset = SFTDataset(
        file, range(len(file)), None, form, InstructionTokenizer(tokenizer, options)
    )
    return collate([dataset[i] for i in range(len(dataset))]), tokenizer.vocab_size


def loss_and_gradients(model: GPTModel, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sum of the losses of the tokens that count, and its gradients."""
    model.zero_grad()
    ready = Preparation(ALONE, torch.device("cpu"), own_positions=True).ready(batch)
    losses = model.forward_step(None, ready)
    assert isinstance(losses, torch.Tensor)
    loss = (losses * batch["loss_mask"]).sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["default", "nemotron-nano-v2"])
@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
def test_a_packed_batch_has_the_loss_and_gradients_of_its_conversations_one_by_one(
    chat: tuple[str, str], position: str, name: str
) -> None:
    batch, vocab_size = packed(chat, name)
    model = GPTModel(
        GPTConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            seq_length=LENGTH,
            position_embedding_type=position,  # type: ignore[arg-type]
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        vocab_size,
    )
    init_parameters(model, 3)
    together, gradients = loss_and_gradients(model, batch)
    total, sums = torch.zeros(()), [torch.zeros_like(g) for g in gradients]
    count = 0
    for row, bounds in enumerate(batch["cu_seqlens"].tolist()):
        for first, last in pairwise(sorted(set(bounds))):
            part = {
                key: batch[key][row : row + 1, first:last]
                for key in ("tokens", "labels", "loss_mask", "position_ids")
            }
            count += 1
            loss, alone = loss_and_gradients(model, part)
            total += loss
            sums = [a + b for a, b in zip(sums, alone, strict=True)]
    assert count == 12
    assert len(batch["tokens"]) < 12
    torch.testing.assert_close(together, total)
    torch.testing.assert_close(gradients, sums)


def test_only_answers_count_in_a_chat_template(chat: tuple[str, str]) -> None:
    tokenizer: Any = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SFTTokenizer",
            tokenizer_model=chat[1],
            sft_tokenizer_prompt_format="default",
        )
    )
    tokens, targets = tokenizer.tokenize_conversation(CHATS[1], answers_only=True)
    runs = np.split(targets, np.flatnonzero(np.diff(targets == IGNORED)) + 1)
    learnt = [tokenizer.decode(run.tolist()) for run in runs if run[0] != IGNORED]
    assert learnt == ["Ho\n", "What is it?\n"]
    assert (tokenizer.tokenize_conversation(CHATS[1], answers_only=False)[1] == tokens).all()


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    forgetful = "{% for turn in messages[-2:] %}{{ turn.content }} {% endfor %}"
    tokenizer: Any = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SFTTokenizer",
            tokenizer_model=write_folder(tmp_path, chat_template=forgetful),
            sft_tokenizer_prompt_format="default",
        )
    )
    with pytest.raises(DataError, match=r"turn 1 \(assistant\): the chat template"):
        tokenizer.tokenize_conversation(CHATS[1], answers_only=True)


# --- whole runs -------------------------------------------------------------------------------


def options(chat: tuple[str, str], save: Path, **more: Any) -> dict[str, Any]:
    shown = {key: value for key, value in RUN.items() if key != "vocab_size"}
    return {
        **shown,
        "num_layers": 2,
        "seq_length": LENGTH,
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": chat[1],
        "sft_tokenizer_prompt_format": "default",
        "data_path": [chat[0]],
        "split": "75,25,0",
        "sft": True,
        "sft_packing": "lines",
        "global_batch_size": 2,
        "train_iters": 4,
        "eval_interval": 2,
        "save_interval": 2,
        "save": str(save),
        **more,
    }


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits_and_learns(
    chat: tuple[str, str], tmp_path: Path
) -> None:
    assert leg(options(chat, tmp_path / "whole")) == "finished"
    assert leg(options(chat, tmp_path / "cut"), dies_after=3) == "died"
    assert leg(options(chat, tmp_path / "cut", num_workers=1)) == "finished"
    ledgers = [(tmp_path / name / "ledger.jsonl").read_text() for name in ("whole", "cut")]
    assert ledgers[0] == ledgers[1]
    lines = [json.loads(line) for line in ledgers[0].splitlines()]
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"]
    # The stages for documents of token files say that these are none.
    found = certificate(tmp_path / "whole")
    assert "--sft: the order of instruction data" in str(found)
    with pytest.raises(ConfigError, match=r"a run of --sft.*blame"):
        describe(from_dict(BlameConfig, {"load": str(tmp_path / "whole"), "step": 1}))


def test_a_cyclic_run_serves_every_record_once_an_epoch(
    chat: tuple[str, str], tmp_path: Path
) -> None:
    more = {"dataloader_type": "cyclic", "sft_packing": "line", "eval_iters": 0}
    config = from_dict(PretrainConfig, options(chat, tmp_path, split="1,0,0", **more))
    length = length_of(config.training, 1, LENGTH)
    data = build_run_data(config, build_tokenizer(config.tokenizer), length)
    batches, count = data.train_batches(0), len(data.train)
    assert count == 12
    epochs = [
        [int(i) for _ in range(count // 2) for i in next(batches)[SAMPLE_IDS][:, 1]]
        for _ in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.slow
def test_middles_are_filled_in_and_a_resumed_run_has_the_same(
    chat: tuple[str, str], tmp_path: Path
) -> None:
    numbers = np.random.RandomState(0)
    documents = [[[*numbers.randint(40, 200, 60).tolist(), 2]] for _ in range(40)]
    tokens = write_tokens(tmp_path / "text", documents)
    marks = {"prefix": 10, "suffix": 11, "middle": 12, "pad": 14}
    more = {f"fim_{name}_token": f"<SPECIAL_{mark}>" for name, mark in marks.items()}
    plain = options(
        chat, tmp_path / "plain", data_path=[tokens], sft=False, sft_packing="line", seq_length=32
    )
    plain |= {"tokenizer_type": "HuggingFaceTokenizer", "lr": 0.01}
    filled = {**plain, "fim_data": True, "fim_rate": 0.9, **more}
    assert leg(plain) == "finished"
    assert leg({**filled, "save": str(tmp_path / "fim")}) == "finished"
    assert leg({**filled, "save": str(tmp_path / "cut")}, dies_after=3) == "died"
    assert leg({**filled, "save": str(tmp_path / "cut")}) == "finished"
    without, whole, cut = (ledger(tmp_path / name) for name in ("plain", "fim", "cut"))
    assert whole == cut
    assert [line["samples"] for line in whole] == [line["samples"] for line in without]
    assert [line["lm_loss"] for line in whole] != [line["lm_loss"] for line in without]


def evaluate_directly(options: dict[str, Any]) -> dict[str, Any]:
    return run_evaluate(from_dict(EvaluateConfig, options), StageRun("evaluate", {}, None))


@pytest.mark.slow
def test_a_retro_is_tuned_without_neighbours_and_its_decoder_is_a_gpt(
    chat: tuple[str, str], tmp_path: Path
) -> None:
    retro = {"model_type": "retro", "retro_chunk_length": 8, "retro_cross_attention_layers": [2]}
    tuned, alone = tmp_path / "retro", tmp_path / "gpt"
    assert leg(options(chat, tuned, **retro)) == "finished"
    run_directly(
        ReshardConfig, run_reshard, load_dir=str(tuned), save_dir=str(alone), decoder_only=True
    )
    theirs, ours = (load_model(str(url)) for url in (tuned, alone))
    assert (theirs.config.model_type, ours.config.model_type) == ("retro", "gpt")
    tokens = torch.arange(30, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(theirs.model(tokens), ours.model(tokens))
    assert ours.step == theirs.step
    # Its loss on a text, beside that of the Retro without neighbours.
    text = tmp_path / "text.txt"
    text.write_text("Hello, what is the weather? " * 20)
    losses = [
        evaluate_directly(
            {"task": "WIKITEXT103", "load": str(url), "valid_data": [str(text)], "device": "cpu"}
        )["avg_loss"]
        for url in (tuned, alone)
    ]
    assert losses[0] == losses[1] > 0
    with pytest.raises(ConfigError, match=r"--decoder-only: .* holds a gpt; only a retro has"):
        run_directly(
            ReshardConfig,
            run_reshard,
            load_dir=str(alone),
            save_dir=str(tmp_path / "again"),
            decoder_only=True,
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sft": False}, "--sft-packing.* only apply with --sft"),
        ({"fim_data": True}, "--fim-data and --sft exclude each other"),
        ({"sft": False, "sft_packing": "line", "fim_rate": 0.1}, "only apply with --fim-data"),
        ({"reset_position_ids": True}, "--reset-position-ids does not apply with --sft"),
        ({"context_parallel_size": 2}, "--cp-comm-type p2p.*and --sft asks for another"),
        ({"model_type": "bert"}, "--sft does not apply with --model-type bert"),
    ],
)
def test_options_that_contradict_instruction_data_are_refused(
    chat: tuple[str, str], tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(PretrainConfig, options(chat, tmp_path, **more))


def test_conversations_need_a_tokenizer_with_a_format(
    chat: tuple[str, str], tmp_path: Path
) -> None:
    plain = options(chat, tmp_path, tokenizer_type="HuggingFaceTokenizer")
    with pytest.raises(ConfigError, match="HuggingFaceTokenizer has no format of conversations"):
        leg(plain)
