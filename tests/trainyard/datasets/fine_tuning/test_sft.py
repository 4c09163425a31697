"""Conversations as samples: packing, masks and bounds, and what is wrong with a line."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.datasets.fine_tuning.conversations import ConversationFile, find_lines
from trainyard.datasets.fine_tuning.records import parse_record, split_conversations
from trainyard.datasets.fine_tuning.sft import SFTDataset, SftFormat, first_fit
from trainyard.datasets.fine_tuning.tokenize import IGNORED
from trainyard.errors import ConfigError, DataError

EOD, PAD, ROLES = 1, 2, {"system": 3, "user": 4, "assistant": 5}
FORM = SftFormat(seq_length=32, eod=EOD, pad=PAD)


class Chat:
    """A turn is the token of its role and a token for each byte; only answers are to be learnt."""

    def __init__(self, end: bool = False) -> None:
        self._end = [EOD] if end else []

    def tokenize_conversation(
        self, conversation: Sequence[dict[str, Any]]
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens: list[int] = []
        targets: list[int] = []
        for turn in conversation:
            if not turn["content"]:
                raise ValueError("an empty turn")
            ids = [ROLES.get(turn["role"], 6), *(10 + b for b in turn["content"].encode())]
            tokens += ids
            targets += ids if turn["role"] == "assistant" else [IGNORED] * len(ids)
        return np.array(tokens + self._end), np.array(targets + self._end)


def turns(*contents: str) -> list[dict[str, str]]:
    """ "s:be kind" is a system turn, and so for u and a."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[c[0]], "content": c[2:]} for c in contents]


ONE = turns("u:hi", "a:hello")
TWO = turns("s:be", "u:hi", "a:ho", "s:am", "u:is", "a:are")
LONG = turns("s:be", "u:" + "x" * 20, "a:" + "y" * 30, "s:no", "u:more")
LINES = [ONE, TWO, LONG]


def write(folder: Path, lines: list[Any]) -> ConversationFile:
    text = "".join(json.dumps({"messages": line}) + "\n" for line in lines)
    (folder / "chat.jsonl").write_text(text)
    return ConversationFile(str(folder / "chat.jsonl"))


def dataset(
    folder: Path, sample_format: SftFormat = FORM, lines: list[Any] = LINES, **rest: Any
) -> SFTDataset:
    file = write(folder, lines)
    return SFTDataset(file, range(len(lines)), None, sample_format, Chat(), **rest)


def slow_sample(line: list[dict[str, Any]], sample_format: SftFormat) -> dict[str, list[int]]:
    """Megatron-LM's packing of a line, one token after the other."""
    s, tokens, goals, places, bounds = sample_format.seq_length, [], [], [], [0]

    def fill(count: int) -> None:
        for _ in range(count):
            tokens.append(PAD)
            goals.append(IGNORED)
            places.append(places[-1] + 1)

    for conversation in split_conversations(line):
        ids, wanted = (row.tolist() for row in Chat().tokenize_conversation(conversation))
        tokens += [*ids, EOD]
        goals += [IGNORED, *wanted[1:], EOD]
        places += range(len(ids) + 1)
        if sample_format.context_parallel_size > 1:
            fill(-len(tokens) % (2 * sample_format.context_parallel_size))
        bounds.append(len(tokens))
        if len(tokens) > s:
            tokens, goals, places = [*tokens[:s], PAD], [*goals[:s], IGNORED], places[: s + 1]
            bounds[-1] = s
            break
    fill(s + 1 - len(tokens))
    bounds[-1] = s
    return {
        "tokens": tokens[:-1],
        "labels": goals[1:],
        "loss_mask": [int(goal != IGNORED) for goal in goals[1:]],
        "position_ids": places[:s],
        "cu_seqlens": bounds + [s] * (s + 1 - len(bounds)),
        "max_seqlen": max(b - a for a, b in pairwise(bounds)),
    }


@pytest.mark.parametrize("seq_length", [8, 16, 24, 32, 64, 96])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_line_is_packed_as_by_the_slow_rule(tmp_path: Path, seq_length: int, cp: int) -> None:
    sample_format = replace(FORM, seq_length=seq_length, context_parallel_size=cp)
    samples = dataset(tmp_path, sample_format)
    for index, line in enumerate(LINES):
        found = {key: values.tolist() for key, values in samples[index].items()}
        assert found == slow_sample(line, sample_format)


def test_what_counts_is_the_answers_and_the_ends(tmp_path: Path) -> None:
    item = dataset(tmp_path)[1]
    learnt = item["labels"][item["loss_mask"] > 0].tolist()
    answers = [[5, *(10 + b for b in text), EOD] for text in (b"ho", b"are")]
    assert learnt == answers[0] + answers[1]
    assert item["labels"][item["loss_mask"] == 0].tolist() == [IGNORED] * (32 - len(learnt))
    assert item["cu_seqlens"][:4].tolist() == [0, 10, 32, 32]
    assert item["max_seqlen"] == 22
    dtypes = {key: str(values.dtype) for key, values in item.items()}
    assert dtypes == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "position_ids": "int64",
        "cu_seqlens": "int32",
        "max_seqlen": "int32",
    }


def test_conversations_apart_and_packed_count_the_same(tmp_path: Path) -> None:
    packed = dataset(tmp_path)[1]
    both = []
    for conversation in split_conversations(TWO):
        item = dataset(tmp_path, lines=[conversation])[0]
        both += item["labels"][item["loss_mask"] > 0].tolist()
    assert packed["labels"][packed["loss_mask"] > 0].tolist() == both


def test_a_pad_that_is_the_end_of_document_takes_no_end_from_the_loss(tmp_path: Path) -> None:
    for pad in (EOD, None):
        item = dataset(tmp_path, replace(FORM, pad=pad))[0]
        assert (item["labels"] == EOD).sum() == 1
        assert item["tokens"][-1] == EOD


def test_an_end_that_is_there_is_not_put_twice(tmp_path: Path) -> None:
    file = write(tmp_path, LINES)
    once = SFTDataset(file, range(3), None, FORM, Chat(end=True))
    twice = SFTDataset(file, range(3), None, FORM, Chat())
    assert all(np.array_equal(once[i]["tokens"], twice[i]["tokens"]) for i in range(3))


def test_without_packing_a_line_is_one_conversation(tmp_path: Path) -> None:
    sample_format = replace(FORM, packing="off")
    samples = dataset(tmp_path, sample_format)
    tokens, targets = Chat().tokenize_conversation(TWO)
    item = samples[1]
    filled = len(tokens) + 1
    assert item["tokens"].tolist() == [*tokens, EOD] + [PAD] * (32 - filled)
    assert item["labels"].tolist() == [*targets[1:], EOD] + [IGNORED] * (33 - filled)
    assert item["position_ids"].tolist() == list(range(32))
    assert "cu_seqlens" not in item
    cut = samples[2]
    assert cut["tokens"][-1] == EOD
    assert cut["tokens"][:-1].tolist() == Chat().tokenize_conversation(LONG)[0][:31].tolist()


def test_lines_that_fit_share_a_sample(tmp_path: Path) -> None:
    lines = [ONE, LONG, ONE, TWO, ONE, ONE]
    samples = dataset(tmp_path, replace(FORM, packing="lines"), lines)
    lengths = samples.line_lengths()
    assert lengths.tolist() == [10, 65, 10, 21, 10, 10]
    # 10 + 10 + 10 leave no room for 21; a longer one has a separate sample.
    assert [samples._members(i) for i in range(len(samples))] == [[0, 2, 4], [1], [3, 5]]
    item = samples[2]
    together = slow_sample([*TWO, *turns("s:?")], FORM)
    assert item["tokens"][:21].tolist() == together["tokens"][:21]
    assert item["cu_seqlens"][:5].tolist() == [0, 10, 21, 32, 32]
    again = dataset(tmp_path, replace(FORM, packing="lines"), lines, lengths=lengths)
    assert np.array_equal(again[2]["tokens"], item["tokens"])


def test_first_fit_takes_the_first_sample_with_room() -> None:
    for seed in range(20):
        lengths = np.random.RandomState(seed).randint(1, 60, 80)
        bins, rooms, wanted = first_fit(lengths, 50), [], []
        for item, length in enumerate(lengths.tolist()):
            length = min(length, 50)
            place = next((p for p, room in enumerate(rooms) if room >= length), len(rooms))
            if place == len(rooms):
                rooms.append(50)
                wanted.append([])
            rooms[place] -= length
            wanted[place].append(item)
        assert [bins[k] for k in range(len(bins))] == wanted
    assert first_fit(np.array([9]), 5)[0] == [0]


def test_more_samples_than_lines_begin_again(tmp_path: Path) -> None:
    samples = SFTDataset(write(tmp_path, LINES), range(1, 3), 7, FORM, Chat())
    assert len(samples) == 7
    assert samples.ids(np.arange(5)).tolist() == [[0, 0], [0, 1], [0, 0], [0, 1], [0, 0]]
    assert samples.numbers(slice(1, 4)).tolist() == [1, 0, 1]
    assert np.array_equal(samples[0]["tokens"], samples[4]["tokens"])
    assert samples[0]["tokens"].tolist() == slow_sample(TWO, FORM)["tokens"]


def test_a_cut_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = dataset(tmp_path, lines=[LONG, LONG])
    with caplog.at_level(logging.WARNING):
        samples[0], samples[1]
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/chat.jsonl: line 1 (byte 0): 65 tokens, cut to --seq-length 32; "
        "further cuts are not logged"
    ]


# --- the file ---------------------------------------------------------------------------------


def test_blank_lines_are_no_conversations_but_count_as_lines(tmp_path: Path) -> None:
    line = json.dumps({"messages": ONE})
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\n\n \t\r\n  {line}\r\n\n{line}".encode())
    file = ConversationFile(str(path))
    assert [file[i] for i in range(len(file))] == [ONE] * 3
    assert [file.where(i).split(": ")[1] for i in range(3)] == [
        "line 1 (byte 3)",
        f"line 4 (byte {len(line) + 9})",
        f"line 6 (byte {2 * len(line) + 14})",
    ]


def test_long_lines_are_read_whole(tmp_path: Path) -> None:
    for size in (4000, 4096 - 44, 4096, 16384, 100_000):
        lines = [turns("u:" + "x" * size), ONE]
        file = write(tmp_path, lines)
        assert [file[0], file[1]] == lines


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"", b" \t", b"\r", b'{"messages": [{"role": "a", "content": "b"}]}']),
        ),
        max_size=8,
    )
)
def test_any_bytes_are_lines_or_named_faults(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    begins, numbers = find_lines(np.frombuffer(data, np.uint8))
    body = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    wanted = [number for number, line in enumerate(body, start=1) if line.strip()]
    assert numbers.tolist() == wanted
    for begin, number in zip(begins.tolist(), wanted, strict=True):
        line = body[number - 1]
        assert data[begin : begin + len(line)] == line
        with contextlib.suppress(ValueError):
            assert parse_record(line)


def test_a_file_of_an_object_store_is_read_as_a_local_one(store_url: str, tmp_path: Path) -> None:
    data = (json.dumps({"messages": ONE}) + "\n").encode()
    store.write_bytes(store.join(store_url, "chat.jsonl"), data * 3)
    file = ConversationFile(store.join(store_url, "chat.jsonl"))
    assert [file[i] for i in range(len(file))] == [ONE] * 3
    kept = ConversationFile(file.url, tmp_path / "cache")
    assert pickle.loads(pickle.dumps(kept))[2] == ONE


def test_a_file_pickles_as_its_url(tmp_path: Path) -> None:
    data = pickle.dumps(write(tmp_path, [turns("u:" + "x" * 10_000)] * 9))
    assert len(data) < 1000
    assert len(pickle.loads(data)) == 9


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": "\xff"}', "not UTF-8: byte 14 of the line"),
        (b"[1]", "not an object but list"),
        (b'{"prompt": "a"}', r"no key 'messages', .* among its \['prompt'\]"),
        (b'{"messages": []}', "not a list of messages, or is empty"),
        (b'{"messages": ["a"]}', "message 0 is not an object with a role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content of message 0 is not a string"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "an empty turn"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
    ],
)
def test_a_fault_names_file_line_and_byte(tmp_path: Path, line: bytes, fault: str) -> None:
    good = json.dumps({"messages": ONE}).encode()
    (tmp_path / "chat.jsonl").write_bytes(good + b"\n" + line + b"\n")
    file = ConversationFile(str(tmp_path / "chat.jsonl"))
    samples = SFTDataset(file, range(2), None, FORM, Chat())
    place = rf"chat\.jsonl: line 2 \(byte {len(good) + 1}\): "
    with pytest.raises(DataError, match=place + f".*({fault})"):
        samples[1]


def test_invalid_files_and_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="has no lines"):
        ConversationFile(str(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError, match=r"uncompressed \.jsonl"):
        ConversationFile(str(tmp_path / "chat.jsonl.gz"))
    with pytest.raises(DataError, match="none of its 3 lines"):
        SFTDataset(write(tmp_path, LINES), range(0), None, FORM, Chat())
    with pytest.raises(ConfigError, match="--context-parallel-size"):
        replace(FORM, seq_length=30, context_parallel_size=2)
    with pytest.raises(ConfigError, match="--sft-packing off"):
        replace(FORM, packing="off", context_parallel_size=2)
    with pytest.raises(ConfigError, match="--seq-length"):
        replace(FORM, seq_length=1)


@pytest.mark.parametrize("packing", ["line", "off", "lines"])
def test_real_conversations(shared: Path, packing: Any) -> None:
    file = ConversationFile(str(shared / "data" / "sft" / "chat_multiturn.jsonl"))
    assert len(file) == 316
    sample_format = replace(FORM, seq_length=4096, packing=packing)
    samples = SFTDataset(file, range(60), None, sample_format, Chat())
    for index in range(len(samples)):
        item = samples[index]
        assert 0 < item["loss_mask"].sum() < 4096
        assert (item["labels"][item["loss_mask"] > 0] >= 0).all()
    if packing == "lines":
        assert len(samples) < 60
