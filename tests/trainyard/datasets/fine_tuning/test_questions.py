"""InstructRetro's prompts, word for word, and the records that they are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.datasets.fine_tuning.config import SftConfig
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.questions import (
    RETRO_WORDING,
    PromptFormat,
    Question,
    read_question,
    task_of,
)
from trainyard.datasets.fine_tuning.sft import SFTDataset, SftFormat
from trainyard.datasets.fine_tuning.tokenize import IGNORED, InstructionTokenizer
from trainyard.errors import ConfigError, DataError

EOD = 256
SYSTEM = (
    "System: This is a chat between a user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions based on the context. The "
    "assistant should also indicate when the answer cannot be found in the context.\n\n"
)
FRANCE = {"title": "France", "text": "Its capital is Paris."}
RECORD = {
    "question": "What is the capital?",
    "answers": ["Paris", "Lutetia"],
    "ctxs": [FRANCE, {"title": "Gaul", "text": "Lutetia."}],
    "sub-paragraphs": "Paris is it.",
    "longform_answer": "It is Paris.",
}


class Bytes:
    """A token for each byte, with a BOS before a whole text."""

    eod, pad, vocab_size = EOD, None, 258

    def encode(self, text: str) -> list[int]:
        return [257, *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Plain(Bytes):
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def asked(question: Question, room: int = 10_000, **options: Any) -> str:
    return Plain().decode(PromptFormat(**options).prompt(question, Plain(), room))


def test_prompts_are_those_of_megatron_lm() -> None:
    given = read_question(RECORD)
    context = "title: , source: Paris is it.\n\n"
    short = "User: Answer the following question with a short span. What is the capital?"
    assert asked(given, task="nq") == f"{SYSTEM}{context}{short}\n\nAssistant: The answer is"
    full = "User: Please give a full and complete answer for the question. What is the capital?"
    assert asked(given, task="eli5") == f"{SYSTEM}{context}{full}\n\nAssistant:"
    assert asked(given, task="nq", num_contexts=0) == f"{SYSTEM}{short}\n\nAssistant: The answer is"
    assert asked(given, task="open_inst") == f"{SYSTEM}What is the capital?"
    assert asked(given, task="quac") == f"{SYSTEM}{context}What is the capital?"
    retro = asked(given, task="nq", wording=RETRO_WORDING)
    assert retro.startswith(SYSTEM.partition(" based")[0] + ".\n\ntitle: ,")
    assert "User: What is the capital? Answer the above question with a short phrase." in retro
    assert asked(given, task="nq", short_format=True) == (
        f"{context}Question: What is the capital? Answer: The answer is"
    )
    assert asked(given, task="nq", template_id=2) == (
        f"{SYSTEM}User: {context}Answer this question based on the article: What is the capital?"
        "\n\nAssistant: The answer is"
    )


def test_contexts_come_from_the_keys_that_are_asked_for() -> None:
    assert read_question(RECORD, "retrieved").contexts == (
        "title: France, source: Its capital is Paris.",
        "title: Gaul, source: Lutetia.",
    )
    assert read_question({**RECORD, "sub-paragraphs": ["T", "X"]}).contexts == (
        "title: T, source: X",
    )
    assert read_question(RECORD, longform=True).answers == ("It is Paris.",)
    choice = {"qa_type": "multi_choice_qa", "multichoice_options": ["x", "y"]}
    assert read_question({**RECORD, **choice}).text == (
        "What is the capital?\nChoose one based on the following options: (A) x (B) y"
    )
    with pytest.raises(ValueError, match="'ctxs' is not a list"):
        read_question({"question": "a", "answers": []}, "retrieved")
    with pytest.raises(ConfigError, match="--template-id must be from 0 to 7"):
        PromptFormat(task="nq", template_id=8)


def test_long_contexts_are_cut_and_only_the_answer_is_learnt(tmp_path: Path) -> None:
    folder = tmp_path / "nq"
    folder.mkdir()
    record = {**RECORD, "sub-paragraphs": "x" * 2000}
    (folder / "nq_QA_train.json").write_text(json.dumps([record, RECORD]))
    file = ConversationFile(str(folder / "nq_QA_train.json"))
    assert task_of(file.url) == "nq"
    form = SftFormat(seq_length=600, eod=EOD)
    dataset = SFTDataset(file, range(2), None, form, InstructionTokenizer(Bytes(), SftConfig()))
    for sample, is_cut in zip(map(dataset.__getitem__, range(2)), (True, False), strict=True):
        tokens, labels = sample["tokens"], sample["labels"]
        assert tokens[0] == 257  # the BOS, once
        assert (tokens == 257).sum() == 1
        learnt = labels[labels != IGNORED]
        assert Bytes().decode(learnt.tolist()) == " Paris"
        assert learnt[-1] == EOD
        text = Bytes().decode(tokens.tolist())
        assert "short span. What is the capital?\n\nAssistant: The answer is Paris" in text
        assert ("x" * 100 in text) is is_cut
        assert len(tokens) == 600
        assert (np.flatnonzero(labels != IGNORED).max() == 598) == is_cut  # the sample is full


def test_a_fault_names_the_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([RECORD, {"question": "?"}]))
    file = ConversationFile(str(tmp_path / "a.json"))
    form = SftFormat(seq_length=600, eod=EOD)
    dataset = SFTDataset(file, range(2), None, form, InstructionTokenizer(Bytes(), SftConfig()))
    with pytest.raises(DataError, match=r"a\.json: record 2: a question without an answer"):
        dataset[1]
    (tmp_path / "b.json").write_text("[{]")
    with pytest.raises(DataError, match="not a list of JSON"):
        ConversationFile(str(tmp_path / "b.json"))


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"prompt": "Add.\n\n1 2", "response": "3"},
        {
            "conversations": [
                {"from": "human", "value": "Add.\n\n1 2"},
                {"from": "gpt", "value": "3"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Add.\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ]
        },
    ],
)
def test_all_shapes_of_a_conversation_say_the_same(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    assert ConversationFile(str(tmp_path / "a.jsonl"))[0] == [
        {"role": "user", "content": "Add.\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
