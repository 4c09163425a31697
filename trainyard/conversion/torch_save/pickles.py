"""Reads pickles of other programs without running anything that they ask for.

A pickle is a program, and unpickling runs it. Here a separate process with neither network nor
files (pickle_reader.py) reads the bytes and answers with a JSON tree. It imports nothing that the
pickle names. Nothing else in the package unpickles."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from trainyard.confinement import answer_of, environment, is_out_of_time
from trainyard.conversion.torch_save import pickle_reader
from trainyard.errors import ArtifactError, InfrastructureError

log = logging.getLogger(__name__)

MEBIBYTE = 2**20

MAX_PICKLE_BYTES = 128 * MEBIBYTE
"""The pickles of checkpoints take a few megabytes, without their tensors."""

MAX_ANSWER_BYTES = 512 * MEBIBYTE

MAX_BATCH = 50_000
"""Most pickles of single tensors for one process."""

TIMEOUT_SECONDS = 300

LIMITS = {
    "input_bytes": MAX_PICKLE_BYTES,
    "memory_bytes": 3072 * MEBIBYTE,
    "cpu_seconds": 120,
    "nodes": 5_000_000,
}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The position of a tensor's values: a storage of the file, and an offset in it."""

    key: str
    """Key of the storage."""
    dtype: str
    """By torch's name: float32."""
    storage_bytes: int
    """Size that the storage must have."""
    offset: int
    """Elements of the storage before the first."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def repeats(self) -> bool:
        """Whether it has more elements than its storage, such as with a stride of 0."""
        return self.numel * SIZES[self.dtype] > self.storage_bytes

    def flat_part(self, start: int, shape: tuple[int, ...]) -> TensorRef:
        """A contiguous tensor of `shape` in a vector, from element `start` on."""
        assert self.stride == (1,), self
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return replace(self, offset=self.offset + start, shape=shape, stride=stride)


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of torch by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records what a pickle did with a class or function that was not imported: an object, the
    result of a call, or the class or function itself."""

    source: str
    """Module and name."""
    args: tuple[Any, ...]
    """Arguments, and items added later."""
    state: Any

    def __hash__(self) -> int:
        """Hashable with any content, since such objects may be keys."""
        return hash(repr(self))


class Namespace(dict[str, Any]):
    """The values of an argparse.Namespace by name."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of a file of torch before 1.6."""

    key: str
    item_bytes: int
    numel: int


@dataclass(frozen=True, slots=True)
class Unpickled:
    """The content of a pickle."""

    tree: Any
    """Containers, numbers and strings as they are; TensorRef, Dtype, Namespace, Recorded for the
    rest; bytes are only counted."""
    network: str
    """How the process was cut off from the network."""
    storages: tuple[StorageRef, ...] = ()
    """In the order of the file; only in the layout of torch before 1.6."""
    end: int = 0
    """Offset of the first of them."""


def unpickle(
    data: bytes | bytearray | memoryview,
    url: str,
    *,
    allow: Collection[str] = (),
    layout: str = "plain",
    limits: Mapping[str, int] | None = None,
) -> Unpickled:
    """Read a pickle in a separate process.

    url: names the file in messages. allow: classes and functions that become Recorded, by module
    and name; one that ends in a dot is a prefix, ANYTHING is all. Only the functions of a fixed
    table make tensors. layout: "legacy" for the beginning of a file of torch before 1.6.
    Raises ArtifactError, which says what a hostile or damaged pickle contains."""
    bounds = {**LIMITS, **(limits or {})}
    if len(data) > bounds["input_bytes"]:
        raise ArtifactError(
            f"{url}: a pickle of {len(data)} bytes; the limit is {bounds['input_bytes']}"
        )
    task = json.dumps({"layout": layout, "allow": sorted(allow), "limits": bounds})
    answer = _ask(data, task, url)
    if "error" in answer:
        raise ArtifactError(f"{url}: its pickle is refused: {answer['error']}")
    try:
        storages = tuple(
            StorageRef(key, SIZES[dtype], numel) for key, dtype, numel in answer.get("storages", ())
        )
        tree, network = _decode(answer["tree"]), str(answer["network"])
        return Unpickled(tree, network, storages, int(answer.get("end", 0)))
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{url}: its pickle is refused: {error}") from error


def unpickle_all(pickles: Sequence[tuple[str, bytes]], *, allow: Collection[str] = ()) -> list[Any]:
    """The trees of many small pickles, read by few processes; otherwise as `unpickle`.

    pickles: (name for messages, bytes)."""
    trees: list[Any] = []
    for some in _batches(pickles):
        task = json.dumps({"layout": "several", "allow": sorted(allow), "limits": LIMITS})
        answer = _ask(b"".join(data for _, data in some), task, some[0][0])
        at = answer.get("at", 0)
        where = some[at][0] if type(at) is int and 0 <= at < len(some) else some[0][0]
        if "error" in answer:
            raise ArtifactError(f"{where}: its pickle is refused: {answer['error']}")
        if answer.get("ends") != list(accumulate(len(data) for _, data in some)):
            raise ArtifactError(f"{where}: its pickle, or one after it, ends before its record")
        try:
            trees += _decode(answer["tree"])
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(f"{where}: its pickle is refused: {error}") from error
    return trees


def _batches(pickles: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Groups of pickles, each as large as the limits of one process allow."""
    some: list[tuple[str, bytes]] = []
    size = 0
    for name, data in pickles:
        if some and (len(some) == MAX_BATCH or size + len(data) > MAX_PICKLE_BYTES):
            yield some
            some, size = [], 0
        some.append((name, data))
        size += len(data)
    if some:
        yield some


# --- the process ------------------------------------------------------------------------------


def _ask(data: bytes | bytearray | memoryview, task: str, url: str) -> dict[str, Any]:
    """The answer of the reader process, which is killed if it takes too long."""
    command = [sys.executable, "-s", "-S", "-P", "-B", "-m", pickle_reader.__name__, task]
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(
                f"cannot start a process that reads {url}: {error}"
            ) from error
        text = answer_of(process, TIMEOUT_SECONDS, MAX_ANSWER_BYTES)
    if process.returncode or len(text) > MAX_ANSWER_BYTES:
        raise ArtifactError(f"{url}: its pickle is refused: {_end_of(process.returncode)}")
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{url}: the reader of its pickle gave no answer") from error
    if not isinstance(answer, dict):
        raise ArtifactError(f"{url}: the reader of its pickle gave no answer")
    return answer


def _end_of(status: int) -> str:
    if is_out_of_time(status):
        return "it takes more time than a checkpoint needs"
    return f"its reader ended with status {status}"


# --- the tree ---------------------------------------------------------------------------------


def _decode(node: Any) -> Any:
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag in ("l", "t"):
        items = [_decode(item) for item in rest[0]]
        return items if tag == "l" else tuple(items)
    if tag in ("d", "n"):
        pairs = {_hashable(_decode(key)): _decode(value) for key, value in rest[0]}
        return pairs if tag == "d" else Namespace(pairs)
    if tag == "T":
        return _tensor_ref(*rest)
    if tag == "y":
        return Dtype(rest[0])
    if tag == "o":
        return Recorded(str(rest[0]), _decode(rest[1]), _decode(rest[2]))
    if tag == "b":
        return Recorded("builtins.bytes", (rest[0],), None)
    raise ValueError(f"unknown tag {tag!r:.40}")


def _hashable(key: Any) -> Any:
    """A key of a dict; an unhashable one becomes text."""
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key


SIZES = {
    **dict.fromkeys(("float64", "int64", "double", "long", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "float", "int", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "half", "short", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "untyped"), 1),
    "complex128": 16,
}
"""Bytes of an element."""


def _tensor_ref(
    key: str,
    storage_dtype: str,
    numel: int,
    dtype: str,
    offset: int,
    shape: list[int],
    stride: list[int],
) -> TensorRef:
    """A TensorRef, checked against its own storage. Reading checks the storage against the file."""
    if dtype == "untyped":
        dtype = "uint8"
    storage_bytes, item = numel * SIZES[storage_dtype], SIZES[dtype]
    if len(shape) != len(stride):
        raise ValueError(f"a tensor of shape {shape} with strides {stride}")
    if math.prod(shape):
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if (last + 1) * item > storage_bytes:
            raise ValueError(f"a tensor of shape {shape} reaches past its storage {key!r}")
    return TensorRef(str(key), dtype, storage_bytes, offset, tuple(shape), tuple(stride))
