"""A pickle of others is read and never run: whatever it asks for, nothing happens but a refusal."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainyard.checkpoint.foreign.pickles import ROOT, Dtype, Noted, unpickle, unpickle_all
from trainyard.errors import ArtifactError


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("inside", [False, True], ids=["bare", "in the args"])
def test_a_payload_is_refused_by_name_and_not_run(
    tmp_path: Path, protocol: int, inside: bool
) -> None:
    witness = tmp_path / "ran"
    payload: Any = Payload(os.system, f"touch {witness}")
    data = pickle.dumps({"args": Namespace(a=payload)} if inside else payload, protocol)
    with pytest.raises(ArtifactError, match=r"file\.pt: .*it asks for (posix|nt)\.system"):
        unpickle(data, "file.pt")
    assert not witness.exists()
    pickle.loads(data)  # the payload is a real one
    assert witness.exists()


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        (Payload(eval, "1"), r"builtins\.eval"),
        (Payload(getattr, os, "system"), r"builtins\.getattr|module"),
        (Payload(subprocess.Popen, ["true"]), r"subprocess\.Popen"),
        (Payload(open, "/etc/passwd"), r"(_?io)\.open"),
        (Payload(__import__, "os"), r"builtins\.__import__"),
        (Payload(torch.load, "x"), r"torch\.serialization\.load"),
        (Payload(bytearray, 2**42), "memory"),
    ],
)
def test_functions_that_reach_out_are_refused(payload: Payload, name: str) -> None:
    try:
        data = pickle.dumps(payload)
    except TypeError:  # a module cannot be pickled; its name can be written by hand
        data = b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nU\x01a\x86R."
        name = r"os\.system"
    with pytest.raises(ArtifactError, match=name):
        unpickle(data, "file.pt")


def test_an_attribute_of_what_is_allowed_is_out_of_reach() -> None:
    # getattr(OrderedDict, "__init__") and on from there is how tables of names are got around
    data = b"\x80\x02cbuiltins\ngetattr\nccollections\nOrderedDict\nX\x08\x00\x00\x00__init__\x86R."
    with pytest.raises(ArtifactError, match=r"builtins\.getattr"):
        unpickle(data, "file.pt")
    dotted = b"\x80\x04\x8c\x08argparse\x8c\x12Namespace.__init__\x93."
    with pytest.raises(ArtifactError, match=r"argparse\.Namespace\.__init__"):
        unpickle(dotted, "file.pt")


def test_what_holds_itself_or_unfolds_without_end_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    wide: list[Any] = [0] * 10
    for _ in range(9):
        wide = [wide] * 10
    for tree, words in ((loop, "holds itself"), (deep, "120 deep"), (wide, "more values")):
        with pytest.raises(ArtifactError, match=words):
            unpickle(pickle.dumps(tree), "file.pt", limits={"nodes": 100_000})


def test_many_are_read_by_one_process_each_for_itself(tmp_path: Path) -> None:
    trees: list[Any] = [{"a": 1}, [torch.float32], "text", {(1, 2): None}]
    many = [(f"{number}.pt", pickle.dumps(tree)) for number, tree in enumerate(trees)]
    assert unpickle_all(many) == [{"a": 1}, [Dtype("float32")], "text", {(1, 2): None}]
    assert unpickle_all([]) == []
    witness = tmp_path / "ran"
    many[2] = ("2.pt", pickle.dumps(Payload(os.system, f"touch {witness}")))
    with pytest.raises(ArtifactError, match=r"^2\.pt: .*posix\.system"):
        unpickle_all(many)
    assert not witness.exists()
    many[2] = ("2.pt", pickle.dumps(1) + pickle.dumps(2))
    with pytest.raises(ArtifactError, match="ends within its record"):
        unpickle_all(many)


def test_objects_may_be_keys() -> None:
    """As those of the index of torch's distributed checkpoint are."""
    names = "torch.distributed."
    index = {MetadataIndex("a", (0, 1)): 1, MetadataIndex("b"): 2}
    found = unpickle(pickle.dumps(index), "x", allow=(names,)).tree
    assert [(key.state["fqn"], value) for key, value in found.items()] == [("a", 1), ("b", 2)]
    assert [found[key] for key in list(found)] == [1, 2]


def test_sizes_are_bounded() -> None:
    with pytest.raises(ArtifactError, match="the limit is 10"):
        unpickle(pickle.dumps(list(range(100))), "file.pt", limits={"input_bytes": 10})
    with pytest.raises(ArtifactError, match="integer of"):
        unpickle(pickle.dumps(1 << 5000), "file.pt")
    with pytest.raises(ArtifactError, match=r"damaged|memory"):
        unpickle(b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f" + b"\x8d" + b"\xff" * 7 + b"\x7f", "x.pt")


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"no pickle at all", pickle.dumps([1])[:-1]])
def test_a_torn_pickle_is_damage(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"file\.pt: .*(damaged|refused)"):
        unpickle(data, "file.pt")


def test_the_reader_has_neither_files_nor_network_nor_processes(tmp_path: Path) -> None:
    program = tmp_path / "try.py"
    program.write_text(
        "import os, socket, subprocess\n"
        "from trainyard.checkpoint.foreign import pickle_reader as inside\n"
        "print(inside.leave_network(), flush=True)\n"
        "inside.confine({'memory_bytes': 2**30, 'cpu_seconds': 10})\n"
        "tries = [lambda: open('/etc/passwd'), lambda: socket.socket(), os.fork,\n"
        "         lambda: os.system('true'), lambda: __import__('ftplib'),\n"
        "         lambda: os.listdir('/'), lambda: subprocess.run(['true'])]\n"
        "for attempt in tries:\n"
        "    try:\n"
        "        attempt()\n"
        "        os.write(1, b'got through\\n')\n"
        "    except inside.Refused:\n"
        "        os.write(1, b'refused\\n')\n"
        "try:\n"
        "    os.dup(0)\n"
        "    os.write(1, b'got through\\n')\n"
        "except OSError:\n"
        "    os.write(1, b'no descriptor\\n')\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env={"PYTHONPATH": ROOT}
    )
    lines = done.stdout.splitlines()
    assert lines[0] in ("in a network namespace of its own", "with sockets refused")
    assert lines[1:] == ["refused"] * 7 + ["no descriptor"], (lines, done.stderr)


def test_plain_values_come_back_as_they_were() -> None:
    tree = {
        "text": "Z\u00fcrich",
        "numbers": [1, -2, 2.5, 10**30],
        "nothing": None,
        3: (True, False),
        "state": OrderedDict(a=1),
        "set": {1, 2},
        "bytes": b"four",
        "dtype": (torch.float32, torch.bfloat16),
        "size": torch.Size([2, 3]),
        "where": Path("/a/b"),
        "args": Namespace(lr=1e-4, split="969,30,1"),
    }
    found = unpickle(pickle.dumps(tree, protocol=2), "file.pt").tree
    for name in ("text", "numbers", "nothing", 3, "state"):
        assert found[name] == tree[name]
    assert list(found["set"]) == [1, 2]
    assert found["bytes"].args == (4,)
    assert [dtype.name for dtype in found["dtype"]] == ["float32", "bfloat16"]
    assert found["size"] == (2, 3)
    assert found["where"] == Noted("pathlib.PosixPath", ("/", "a", "b"), None)
    assert found["args"] == {"lr": 1e-4, "split": "969,30,1"}


def test_classes_are_noted_only_where_they_are_allowed() -> None:
    data = b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R."
    with pytest.raises(ArtifactError, match=r"megatron\.core\.enums\.ModelType"):
        unpickle(data, "file.pt")
    found = unpickle(data, "file.pt", allow=["megatron."]).tree
    assert found == Noted("megatron.core.enums.ModelType", (1,), None)
    assert "megatron" not in sys.modules
