"""The program of the sandbox process that reads pickles. Uses only the standard library, and
imports nothing that a pickle asks for (pickle_names.py).

    stdin    the bytes
    argv[1]  JSON {"layout": "plain", "legacy" or "several", "allow": [...], "limits": {...}}
    stdout   JSON {"tree": ..., "network": ...} or {"error": ...}
             legacy: also "storages": [[name, dtype, elements]] in the order of the file, and
             "end": where the first storage begins
             several pickles, one after the other: "tree" is a list of trees, "ends" where each
             pickle ends; an error has "at", the index of its pickle

The tree encodes values as [tag, ...]: "l" list, "t" tuple, "d" dict (pairs), "T" tensor, "y" dtype,
"n" namespace (pairs), "o" an object, class or function that was recorded (name, arguments and
items, state), "b" bytes (only their number). Numbers, strings and null stand for themselves.

Before the first opcode, the process gives up network, files, new processes, and memory beyond a
limit."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainyard import confinement
from trainyard.conversion.torch_save.pickle_names import (
    ANYTHING,
    CONTAINERS,
    Call,
    Dtype,
    Inert,
    Namespace,
    Refused,
    Storage,
    Tensor,
    look_up,
)

MAX_DEPTH = 120
"""Deepest nesting of the tree; it also stops a tree that contains itself."""

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


class Unpickler(pickle.Unpickler):
    """The opcodes of `pickle`, with `look_up` for every name."""

    def __init__(self, file: io.BytesIO, allow: tuple[str, ...]) -> None:
        super().__init__(file, encoding="utf-8")
        self._allow = allow
        self.storages: dict[str, list[Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; never imports."""
        return look_up(module, name, self._allow)

    def persistent_load(self, pid: Any) -> Storage:
        """A storage of torch: ("storage", type, key, device, numel[, view])."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise Refused(f"a reference to {type(pid).__name__} outside of the pickle")
        _, dtype, key, _, numel = pid[:5]
        if len(pid) == 6 and pid[5] is not None:
            raise Refused(
                "a view of a storage, as torch before 1.0 wrote it; load and save the file with a "
                "newer torch"
            )
        if not isinstance(dtype, Dtype) or type(numel) is not int or numel < 0:
            raise Refused("a storage without type and size")
        self.storages[str(key)] = [dtype.name, numel]
        return Storage(str(key), dtype.name, numel)


# --- the tree ---------------------------------------------------------------------------------

NAMES = {kind: name for name, kind in reversed(CONTAINERS.items()) if isinstance(kind, type)}
"""Names of classes that a pickle may refer to without using them, such as a default_factory."""


class Encoder:
    """Turns an unpickled object into JSON, within limits."""

    def __init__(self, max_nodes: int, allow: tuple[str, ...]) -> None:
        self._left = max_nodes
        self._allows_anything = ANYTHING in allow

    def encode(self, value: Any, depth: int = 0) -> Any:
        """One value."""
        self._left -= 1
        if self._left < 0:
            raise Refused("it expands to more values than a checkpoint has")
        if depth > MAX_DEPTH:
            raise Refused(f"it is nested more than {MAX_DEPTH} deep, or contains itself")
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            if (bits := value.bit_length()) <= 256:
                return value
            if self._allows_anything:
                return ["o", f"an integer of {bits} bits", ["t", []], None]
            raise Refused(f"an integer of {bits} bits")
        return self._composed(value, depth + 1)

    def _composed(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return ["d", self._pairs(value, depth)]
        if isinstance(value, list):
            return ["l", [self.encode(item, depth) for item in value]]
        if isinstance(value, tuple):
            return ["t", [self.encode(item, depth) for item in value]]
        if isinstance(value, (set, frozenset)):
            return ["t", sorted((self.encode(item, depth) for item in value), key=str)]
        if isinstance(value, (bytes, bytearray)):
            return ["b", len(value)]
        if isinstance(value, Dtype):
            return ["y", value.name]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Namespace):
            given = value.state if isinstance(value.state, dict) else {}
            return ["n", self._pairs(given, depth)]
        if isinstance(value, Inert):
            args = self.encode((*value.args, *value.items), depth)
            return ["o", value.source, args, self.encode(value.state, depth)]
        if isinstance(value, (type, Call)):
            return ["o", _name_of(value), ["t", []], None]
        raise Refused(f"a {type(value).__name__}, which no file of tensors needs")

    def _pairs(self, mapping: dict[Any, Any], depth: int) -> list[Any]:
        pairs = dict.items(mapping)  # a pickle can replace the object's own `items`
        return [[self.encode(k, depth), self.encode(v, depth)] for k, v in pairs]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        numbers = (tensor.offset, *tensor.shape, *tensor.stride)
        if any(type(n) is not int or n < 0 or n >= 2**62 for n in numbers):
            raise Refused("a tensor whose shape, stride or offset are not counts")
        storage = tensor.storage
        self._left -= len(numbers)
        return [
            "T",
            *(storage.key, storage.dtype, storage.numel, tensor.dtype, tensor.offset),
            *(list(tensor.shape), list(tensor.stride)),
        ]


def _name_of(value: type | Call) -> str:
    if isinstance(value, Call) or issubclass(value, Inert):
        return value.source
    return NAMES[value]


# --- the process ------------------------------------------------------------------------------


def confine(limits: Mapping[str, int]) -> None:
    """Bound memory and time, and refuse files, sockets, processes and imports from here on."""
    confinement.confine(limits["memory_bytes"], limits["cpu_seconds"])
    sys.addaudithook(_refuse_events)


def _refuse_events(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: Python announces whatever leaves the interpreter, such as files and sockets."""
    raise Refused(f"it led to {event}")


def read_all(data: bytes, layout: str, allow: tuple[str, ...], max_nodes: int) -> dict[str, Any]:
    """The answer for a plain pickle, several, or the five at the start of a file of torch < 1.6."""
    file = io.BytesIO(data)

    def load() -> Any:
        return Unpickler(file, allow).load()

    if layout == "plain":
        return {"tree": Encoder(max_nodes, allow).encode(load())}
    if layout == "several":
        return _read_several(file, len(data), load, Encoder(max_nodes, allow))
    if load() != MAGIC or load() != PROTOCOL:
        raise Refused("it is not a file of torch.save")
    system = load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("it was written on a big-endian machine")
    unpickler = Unpickler(file, allow)
    tree = Encoder(max_nodes, allow).encode(unpickler.load())
    keys = load()
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise Refused("its list of storages is not a list of names")
    strange = [key for key in keys if key not in unpickler.storages]
    if strange:
        raise Refused("its list of storages has one that no tensor uses")
    storages = [[key, *unpickler.storages[key]] for key in keys]
    return {"tree": tree, "storages": storages, "end": file.tell()}


def _read_several(
    file: io.BytesIO, size: int, load: Callable[[], Any], encoder: Encoder
) -> dict[str, Any]:
    trees: list[Any] = []
    ends: list[int] = []
    while file.tell() < size:
        try:
            trees.append(encoder.encode(load()))
        except MemoryError:
            raise
        except Exception as error:
            return {"error": _reason(error), "at": len(ends)}
        ends.append(file.tell())
    return {"tree": ["l", trees], "ends": ends}


def _reason(error: BaseException) -> str:
    if isinstance(error, Refused):
        return str(error)
    return f"it is damaged ({type(error).__name__}: {error})"[:500]


def main() -> None:
    """Read the task and answer on stdout, even on errors."""
    task = json.loads(sys.argv[1])
    limits, allow = task["limits"], tuple(task["allow"])
    data = sys.stdin.buffer.read(limits["input_bytes"] + 1)
    json.dumps({"warm": [1.5, None, "\u00e9"]})  # triggers late imports now, before `confine`
    network = confinement.leave_network()
    try:
        confine(limits)
        if len(data) > limits["input_bytes"]:
            raise Refused(f"it is larger than {limits['input_bytes']} bytes")
        answer = read_all(data, task["layout"], allow, limits["nodes"])
        text = json.dumps({**answer, "network": network}).encode("ascii")
    except MemoryError:
        text = json.dumps({"error": "it takes more memory than a checkpoint needs"}).encode("ascii")
    except BaseException as error:
        text = json.dumps({"error": _reason(error)}).encode("ascii")
    view = memoryview(text)
    while view:
        view = view[os.write(1, view) :]
    os._exit(0)  # without running any destructor of an unpickled object


if __name__ == "__main__":
    main()
