"""A pickle of others is read and never run: whatever it asks for, nothing happens but a refusal."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import operator
import os
import pickle
import signal
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainyard.confinement import ROOT
from trainyard.conversion.torch_save.pickle_names import ANYTHING
from trainyard.conversion.torch_save.pickles import Dtype, Recorded, unpickle, unpickle_all
from trainyard.errors import ArtifactError


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.few_cases(2)
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


@pytest.mark.few_cases(3)
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


def test_attributes_of_allowed_names_are_refused() -> None:
    # getattr(OrderedDict, "__init__") and on from there is how tables of names are got around
    data = b"\x80\x02cbuiltins\ngetattr\nccollections\nOrderedDict\nX\x08\x00\x00\x00__init__\x86R."
    with pytest.raises(ArtifactError, match=r"builtins\.getattr"):
        unpickle(data, "file.pt")
    dotted = b"\x80\x04\x8c\x08argparse\x8c\x12Namespace.__init__\x93."
    with pytest.raises(ArtifactError, match=r"argparse\.Namespace\.__init__"):
        unpickle(dotted, "file.pt")


def test_recursive_and_endless_pickles_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    wide: list[Any] = [0] * 10
    for _ in range(9):
        wide = [wide] * 10
    for tree, words in ((loop, "contains itself"), (deep, "120 deep"), (wide, "more values")):
        with pytest.raises(ArtifactError, match=words):
            unpickle(pickle.dumps(tree), "file.pt", limits={"nodes": 100_000})


def test_one_process_reads_many_pickles_independently(tmp_path: Path) -> None:
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
    with pytest.raises(ArtifactError, match="ends before its record"):
        unpickle_all(many)


def test_objects_may_be_keys() -> None:
    """As those of the index of torch's distributed checkpoint are."""
    from torch.distributed.checkpoint.metadata import MetadataIndex  # takes a second

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
def test_a_truncated_pickle_is_reported_as_damage(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"file\.pt: .*(damaged|refused)"):
        unpickle(data, "file.pt")


def test_the_reader_has_neither_files_nor_network_nor_processes(tmp_path: Path) -> None:
    program = tmp_path / "try.py"
    program.write_text(
        "import os, socket, subprocess\n"
        "from trainyard.conversion.torch_save import pickle_reader as inside\n"
        "print(inside.confinement.leave_network(), flush=True)\n"
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
    assert found["where"] == Recorded("pathlib.PosixPath", ("/", "a", "b"), None)
    assert found["args"] == {"lr": 1e-4, "split": "969,30,1"}


def test_classes_are_recorded_only_if_allowed() -> None:
    data = b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R."
    with pytest.raises(ArtifactError, match=r"megatron\.core\.enums\.ModelType"):
        unpickle(data, "file.pt")
    found = unpickle(data, "file.pt", allow=["megatron."]).tree
    assert found == Recorded("megatron.core.enums.ModelType", (1,), None)
    assert "megatron" not in sys.modules


# --- what is no tensor ----------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Outer:
    class Inner(enum.Enum):
        MEMBER = 5


@dataclasses.dataclass
class Schedule:
    rate: float
    steps: list[int]


class Words(list[str]):
    """A class of a list, with something of its own."""

    def __init__(self, *words: str) -> None:
        super().__init__(words)
        self.language = "de"


class Pair:
    """Made by a call with names, as `__getnewargs_ex__` has it."""

    def __new__(cls, left: int, *, right: int) -> Pair:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (1,), {"right": 2}


HERE = __name__

VALUES: list[tuple[Any, tuple[str, ...]]] = [
    (signal.SIGTERM, ("signal.Signals", "15")),
    (Colour.RED, (f"{HERE}.Colour", "red")),
    (Bits.ONE | Bits.TWO, (f"{HERE}.Bits", "3")),
    (Outer.Inner.MEMBER, (f"{HERE}.Outer.Inner", "5")),
    (Schedule(0.5, [1, 2]), (f"{HERE}.Schedule", "0.5", "[1, 2]")),
    (Schedule, (f"{HERE}.Schedule",)),
    (operator.add, ("operator.add",)),
    (torch.nn.functional.gelu, ("gelu",)),
    (torch._utils._rebuild_tensor_v2, ("torch._utils._rebuild_tensor_v2",)),
    (functools.partial(max, 1, key=abs), ("functools.partial", "builtins.max", "builtins.abs")),
    (defaultdict(list, a=[1]), ("collections.defaultdict", "builtins.list", "('a', [1])")),
    (deque([1, 2], maxlen=7), ("collections.deque", "7", "1, 2")),
    (Words("ja", "nein"), (f"{HERE}.Words", "ja", "nein", "'language': 'de'")),
    (Pair(1, right=2), (f"{HERE}.Pair",)),
    (Path("/a/b"), ("PosixPath", "'a', 'b'")),
    (np.float32(0.5), ("multiarray.scalar",)),
    (np.arange(3), ("multiarray._reconstruct",)),
    (np.dtype("int16"), ("numpy.dtype", "i2")),
    (torch.bfloat16, ("bfloat16",)),
    (torch.device("cpu"), ("torch.device", "cpu")),
    ({1, 2}, ("(1, 2)",)),
    (frozenset({Colour.RED}), (f"{HERE}.Colour",)),
    (complex(1, 2), ("builtins.complex", "1.0, 2.0")),
    (range(3), ("range", "0, 3, 1")),
    (slice(1, 2), ("builtins.slice",)),
    (decimal.Decimal("1.5"), ("decimal.Decimal", "1.5")),
    (datetime.timedelta(seconds=5), ("datetime.timedelta", "5")),
    (ValueError("no"), ("ValueError", "no")),
    (float, ("builtins.float",)),
    (OrderedDict, ("collections.OrderedDict",)),
]


@pytest.mark.parametrize("protocol", [2, 4])
def test_other_objects_of_a_run_are_recorded_by_name(protocol: int) -> None:
    """As the args of a release that is not there, with all its helpers."""
    args = Namespace(lr=0.5, **{f"x{n}": value for n, (value, _) in enumerate(VALUES)})
    found = unpickle(pickle.dumps(args, protocol), "x.pt", allow=[ANYTHING]).tree
    assert found["lr"] == 0.5
    for number, (value, words) in enumerate(VALUES):
        text = repr(found[f"x{number}"])
        assert all(word in text for word in words), (value, text)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_payload_is_recorded_and_not_run_if_anything_is_allowed(
    tmp_path: Path, protocol: int
) -> None:
    witness = tmp_path / "ran"
    payload = Payload(os.system, f"touch {witness}")
    data = pickle.dumps({"args": Namespace(a=payload, b=Payload(eval, "1"))}, protocol)
    args = unpickle(data, "x.pt", allow=[ANYTHING]).tree["args"]
    assert args["a"] == Recorded(f"{os.name}.system", (f"touch {witness}",), None)
    assert args["b"] == Recorded("builtins.eval", ("1",), None)
    assert not witness.exists()


def named(module: str, name: str) -> bytes:
    """The opcode that asks for a name."""
    return f"c{module}\n{name}\n".encode()


def pickled(value: Any) -> bytes:
    """Opcodes of a plain value."""
    return pickle.dumps(value, 2)[2:-1]


REBUILD = named("torch._utils", "_rebuild_tensor_v2")
STORAGE = b"(" + pickled("storage") + named("torch", "FloatStorage") + pickled("0")
TENSOR = REBUILD + b"((" + STORAGE[1:] + pickled("cpu") + b"K\x04tQK\x00K\x04\x85K\x01\x85tR"


def in_slot(name: str, value: bytes) -> bytes:
    """A state that sets a slot."""
    return b"N}" + pickled(name) + value + b"s\x86b"


BUILDS: dict[str, tuple[bytes, str]] = {
    "a function": (
        REBUILD + in_slot("_function", named("collections", "OrderedDict")) + b")R",
        "gives a call of the reader a state",
    ),
    "a tensor": (TENSOR + in_slot("shape", pickled((10**9,))), "gives a tensor of the reader"),
    "a type": (named("torch", "float32") + in_slot("name", pickled("x")), "gives a dtype of the"),
    "a class": (
        named("argparse", "Namespace") + in_slot("args", pickled(())),
        "gives the class argparse.Namespace a state",
    ),
    "a class that is noted": (
        named("evil", "Class") + in_slot("__call__", named("collections", "OrderedDict")),
        "gives the class evil.Class a state",
    ),
    "a container's class": (
        named("collections", "OrderedDict") + in_slot("items", named("builtins", "list")),
        "damaged",
    ),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("what", BUILDS)
def test_a_state_cannot_change_the_reader(what: str) -> None:
    code, words = BUILDS[what]
    sound = unpickle(b"\x80\x02" + TENSOR + b".", "x.pt").tree
    assert sound.shape == (4,)
    with pytest.raises(ArtifactError, match=words):
        unpickle(b"\x80\x02" + code + b".", "x.pt", allow=[ANYTHING])


def test_a_state_of_a_container_does_not_hide_what_is_in_it() -> None:
    state = b"}" + pickled("items") + named("builtins", "list") + b"sb"
    data = b"\x80\x02" + pickled(OrderedDict(a=1)) + state + b"."
    assert unpickle(data, "x.pt").tree == {"a": 1}


def test_an_inert_object_records_its_state() -> None:
    state = b"}" + pickled("__class__") + named("builtins", "dict") + b"sb"
    data = b"\x80\x02" + named("evil", "Class") + b")R" + state + b"."
    found = unpickle(data, "x.pt", allow=[ANYTHING]).tree
    kept = {"__class__": Recorded("builtins.dict", (), None)}
    assert found == Recorded("evil.Class", (), kept)


STRANGE: list[tuple[Callable[[], bytes], str]] = [
    (lambda: named("m" * 400, "x"), "is not the name of a class"),
    (lambda: named("os", "\x1b[2J"), r"'os\.\\x1b\[2J', which is not the name"),
    (lambda: REBUILD + b"(" + named("evil", "storage") + b")RK\x00))tR", "is not a storage"),
    (lambda: b"(" + pickled("module") + b"tQ", "a reference to tuple outside"),
    (lambda: named("evil", "f") + b")R" * 200, "120 deep"),
    (lambda: b"\x82\x01", "unregistered extension code"),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("code", "words"), STRANGE)
def test_limits_and_tables_apply_even_if_anything_is_allowed(
    code: Callable[[], bytes], words: str
) -> None:
    with pytest.raises(ArtifactError, match=words):
        unpickle(b"\x80\x02" + code() + b".", "x.pt", allow=[ANYTHING])
