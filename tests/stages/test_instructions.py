"""Instruction data of every usual layout becomes data sets of InstructRetro."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.instructions import divided, main, read
from trainyard.datasets.fine_tuning.config import SftConfig
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.instruct_retro import converted
from trainyard.datasets.fine_tuning.questions import RETRO_WORDING
from trainyard.datasets.fine_tuning.tokenize import IGNORED, InstructionTokenizer
from trainyard.errors import DataError
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

ASKED, ANSWERED = "Name a colour.", "Blue."
SAME: dict[str, dict[str, Any]] = {
    "openai": {
        "messages": [
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": ANSWERED},
        ]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]
    },
    "alpaca": {"instruction": ASKED, "input": "", "output": ANSWERED},
    "dolly": {"prompt": ASKED, "response": ANSWERED},
}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "tool_call", "content": "{}"},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five."},
]
QUESTION = "Where is Nice?"


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("layout", SAME)
def test_every_layout_of_a_conversation_is_one_record(layout: str) -> None:
    wanted = [{"question": f"User: {ASKED}\n\nAssistant:", "answer": ANSWERED}]
    assert converted(SAME[layout], "open_inst") == wanted


def test_every_turn_of_the_assistant_is_learnt_after_all_before_it() -> None:
    first, second = converted({"messages": TURNS}, "oasst")
    assert first["question"] == "System: Be brief.\n\nUser: Two and two?\n\nAssistant:"
    before = f"{first['question']} {first['answer']}\n\nTool call: {{}}\n\nUser: And one?"
    assert second == {"question": f"{before}\n\nAssistant:", "answer": "Five."}


@pytest.mark.parametrize(
    ("record", "answers", "more"),
    [
        (
            {"context": "Nice is in France.", "title": "Nice", "answers": {"text": ["France"]}},
            ["France"],
            {"sub-paragraphs": ["Nice", "Nice is in France."]},
        ),
        ({"answer": {"value": "France", "aliases": ["France", "FR"]}}, ["France", "FR"], {}),
        (
            {"answers": ["FR"], "positive_ctxs": [{"title": "a", "text": "b"}], "dataset": "nq"},
            ["FR"],
            {"ctxs": [{"title": "a", "text": "b"}]},
        ),
        ({"answer": "FR"}, ["FR"], {}),
        ({"answers": [{"text": "FR"}], "sub_paragraph": "c"}, [{"text": "FR"}], {}),
    ],
    ids=["squad", "triviaqa", "dpr", "one answer", "instruct-retro"],
)
def test_questions_are_under_the_keys_of_instruct_retro(
    record: dict[str, Any], answers: list[Any], more: dict[str, Any]
) -> None:
    (found,) = converted({"question": QUESTION, **record}, "nq")
    kept = {key: record[key] for key in ("sub_paragraph",) if key in record}
    assert found == {"question": QUESTION, "answers": answers, **more, **kept}


def test_squads_own_document_is_read(tmp_path: Path) -> None:
    asked = {"question": QUESTION, "answers": [{"text": "France"}]}
    paragraph = {"context": "Nice is in France.", "qas": [asked]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"title": "Nice", "paragraphs": [paragraph]}]}))
    ((found,),) = read([str(path)], "squad1.1")
    assert found["sub-paragraphs"] == ["Nice", "Nice is in France."]


@pytest.mark.parametrize(
    ("record", "name", "words"),
    [
        (SAME["alpaca"], "nq", r"line 1 .*a conversation, which .*open_inst.*, not nq"),
        ({"question": "a", "answer": "b"}, "oasst", "a question, and oasst has conversations"),
        ({"question": "a", "answers": []}, "nq", "a question without an answer"),
        ({"messages": TURNS[:2]}, "oasst", "without a turn of the assistant"),
        ({"chosen": "a"}, "oasst", r"no key 'messages'.*\['chosen'\]"),
    ],
)
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, record: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        read([write(tmp_path / "a.jsonl", record)], name)


def test_a_conversation_is_in_one_part_and_every_record_in_some() -> None:
    records = [[{"question": str(n), "answer": str(t)} for t in range(2)] for n in range(50)]
    parts = divided(list(records), "80,10,10", 1)
    assert [len(part) for part in parts] == [80, 10, 10]
    assert sorted(str(one) for part in parts for one in part) == sorted(
        str(one) for record in records for one in record
    )
    places = [{one["question"] for one in part} for part in parts]
    assert not places[0] & places[1] | places[0] & places[2] | places[1] & places[2]
    assert divided(list(records), "80,10,10", 1) == parts
    assert divided(list(records), "80,10,10", 2) != parts


def test_a_tuning_reads_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", *SAME.values())
    words = [source, "--name", "open_inst", "--data-folder", str(tmp_path / "D")]
    assert main([*words, "--split", "3,1,0"]) == 0
    assert "3 records in " in capsys.readouterr().out
    place = tmp_path / "D/open_inst"
    assert {path.name for path in place.iterdir()} == {
        "open_inst_QA_train.json",
        "open_inst_QA_dev.json",
    }
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    record = ConversationFile(str(place / "open_inst_QA_train.json"))[0]
    assert isinstance(record, dict)
    of_record = InstructionTokenizer(tokenizer, SftConfig(sft=True), RETRO_WORDING)
    tokens, targets = of_record.tokenize_question(record, "open_inst", 512)
    prompt = f"{RETRO_WORDING.system}User: {ASKED}\n\nAssistant:"
    assert tokenizer.decode(tokens.tolist()) == f"{prompt} {ANSWERED}"
    assert tokenizer.decode(targets[targets != IGNORED].tolist()) == f" {ANSWERED}"


def test_no_record_of_training_stays_in_the_validation_of_an_earlier_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", *SAME.values())
    words = [source, "--name", "open_inst", "--data-folder", str(tmp_path / "D"), "--split"]
    assert main([*words, "50,50,0"]) == 0
    place = tmp_path / "D/open_inst"
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    capsys.readouterr()
    assert main([*words, "100,0,0"]) == 2
    said = capsys.readouterr().err
    assert f"{place} has open_inst_QA_dev.json, for which --split leaves no records" in said
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    (place / "open_inst_QA_dev.json").unlink()
    assert main([*words, "100,0,0"]) == 0
    assert len(json.loads((place / "open_inst_QA_train.json").read_bytes())) == len(SAME)


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("alpaca_en.jsonl", 800),
        ("alpaca_zh.jsonl", 400),
        ("dolly_hhrlhf.prompt_response.jsonl", 800),
        ("chat_multiturn.jsonl", 316),
    ],
)
def test_published_data_is_converted_whole(shared: Path, file: str, least: int) -> None:
    found = read([str(shared / "data/sft" / file)], "open_inst")
    assert len(found) == least
    assert all(one["question"].endswith("Assistant:") for turns in found for one in turns)
