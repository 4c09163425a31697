"""Tensor files made to do harm are refused by name: nothing crashes, hangs, or is run."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.hostile import (
    MODEL,
    NAME,
    load,
    make_step,
    refusal,
    refuses_to_read,
    vouch,
)
from tests.trainyard.conversion.torch_save.test_pickles import Payload
from trainyard.checkpoint.load import open_checkpoint
from trainyard.errors import ArtifactError


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return make_step(tmp_path)


def shard(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = (4, 6)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


B = entry(96, 108, shape=(3,))
DATA = bytes(108)
GOOD = {NAME: entry(0, 96), "model.b": B}

SHARDS: dict[str, tuple[bytes, str]] = {
    "an oversized header": (shard(GOOD, DATA, 2**62), "not safetensors"),
    "a header of 100 MB": (shard(GOOD, DATA, 100_000_001), "the limit is 100000000"),
    "a header beyond the end": (shard(GOOD, DATA, 5000), "truncated"),
    "nothing": (b"", "that it has 0"),
    "a few bytes": (b"\0\0\0", "that it has 3"),
    "truncated": (shard(GOOD, DATA[:-1]), "truncated"),
    "grown": (shard(GOOD, DATA + b"1"), "1 bytes follow"),
    "grown by a tensor": (shard({**GOOD, "x": entry(108, 112, shape=(1,))}, DATA), "truncated"),
    "overlapping": (shard({**GOOD, "model.b": entry(90, 102, shape=(3,))}, DATA), "ends at"),
    "the same bytes twice": (shard({NAME: entry(0, 96), "c": entry(0, 96)}, DATA), "ends at"),
    "a gap at the beginning": (shard({NAME: entry(4, 100)}, bytes(100)), "ends at"),
    "a gap": (shard({**GOOD, "model.b": entry(100, 112, shape=(3,))}, bytes(112)), "ends at"),
    "another type": (shard({**GOOD, NAME: entry(0, 96, "I32")}, DATA), "the file holds I32"),
    "another shape": (shard({**GOOD, NAME: entry(0, 96, shape=(6, 4))}, DATA), "the file holds"),
    "another name": (shard({"model.c": entry(0, 96), "model.b": B}, DATA), "no such tensor"),
    "an unknown type": (shard({**GOOD, NAME: entry(0, 96, "PICKLE")}, DATA), "unknown dtype"),
    "a type that is a list": (shard({**GOOD, NAME: entry(0, 96, ["F32"])}, DATA), "unknown dtype"),
    "a negative shape": (shard({**GOOD, NAME: entry(0, 96, shape=(-4, -6))}, DATA), "not counts"),
    "negative": (shard({**GOOD, NAME: entry(-96, 0)}, DATA), "not counts"),
    "end before begin": (shard({**GOOD, NAME: entry(96, 0)}, DATA), "takes 96 bytes"),
    "huge": (shard({**GOOD, NAME: entry(0, 2**70, shape=(2**68,))}, DATA), "not counts"),
    "larger than memory": (shard({**GOOD, NAME: entry(0, 96, shape=(0, 2**62, 8))}, DATA), "large"),
    "many dims": (shard({**GOOD, NAME: entry(0, 4, shape=(1,) * 100)}, DATA), "not counts"),
    "a float": (shard({**GOOD, NAME: entry(0, 96, shape=(4.0, 6))}, DATA), "not counts"),
    "NaN": (shard(b'{"a": NaN}', DATA), "not a number"),
    "nested": (shard(b"[" * 100_000, b""), "nested"),
    "a list": (shard([], DATA), "not well-formed"),
    "not json": (shard(b"not json", DATA), "not well-formed"),
    "a number": (shard(5, DATA), "not well-formed"),
    "not text": (shard(b"\xff\xfe\xfd", DATA), "not well-formed"),
    "metadata of numbers": (shard({**GOOD, "__metadata__": {"a": 1}}, DATA), "table of strings"),
    "metadata that is a list": (shard({**GOOD, "__metadata__": ["a"]}, DATA), "table of strings"),
    "a name twice": (
        shard(
            json.dumps(GOOD).encode()[:-1] + b',"model.a":' + json.dumps(B).encode() + b"}", DATA
        ),
        "is given twice",
    ),
    "a zip": (b"PK\x03\x04" + bytes(200), "a pickle or an archive"),
}


@pytest.mark.few_cases(12)
@pytest.mark.parametrize("what", SHARDS)
def test_a_tensor_file_that_is_none_is_refused(step: Path, what: str) -> None:
    data, words = SHARDS[what]
    (step / MODEL).write_bytes(data)
    vouch(step)
    text = refuses_to_read(step)
    assert MODEL in text
    assert words in text


def test_the_shard_of_the_tests_is_sound(step: Path) -> None:
    (step / MODEL).write_bytes(shard(GOOD, DATA))
    vouch(step)
    load(step)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_in_the_place_of_a_file_is_not_run(
    step: Path, tmp_path: Path, protocol: int
) -> None:
    payload = pickle.dumps(Payload(Path.touch, tmp_path / "ran"), protocol)
    for name in (MODEL, "index.json", "state.json", "config.json", "manifest.json"):
        original = (step / name).read_bytes()
        (step / name).write_bytes(payload + bytes(200))
        if name != "manifest.json":
            vouch(step)
        assert name in refusal(step)
        (step / name).write_bytes(original)
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload)  # that it would have been seen
    assert (tmp_path / "ran").exists()


def test_what_torch_saves_is_not_run(step: Path, tmp_path: Path) -> None:
    torch.save({"a": Payload(Path.touch, tmp_path / "ran")}, step / MODEL)
    vouch(step)
    assert "a pickle or an archive" in refuses_to_read(step)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_changes_while_it_is_read_is_named(step: Path) -> None:
    with open_checkpoint(str(step)) as checkpoint:
        checkpoint.read("model.b")
        with (step / MODEL).open("r+b") as file:  # in place: it can be nothing else's
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(step / MODEL, ns=(0, 0))
        with pytest.raises(ArtifactError, match=f"{MODEL}: changed while"):
            checkpoint.read(NAME)


def test_a_file_that_is_cut_short_while_it_is_read_is_no_crash(step: Path) -> None:
    with open_checkpoint(str(step)) as checkpoint:
        checkpoint.read("model.b")
        os.truncate(step / MODEL, 200)  # of a mapped file this would have been a SIGBUS
        with pytest.raises(ArtifactError, match=f"{MODEL}: (ends at byte|changed)"):
            checkpoint.read(NAME)
