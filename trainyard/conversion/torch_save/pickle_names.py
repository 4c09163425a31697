"""Maps the names that a pickle asks for to harmless stand-ins, for `pickle_reader`.

A table has tensors, dtypes and containers. Other allowed classes and functions become `Inert`
objects, which record their name and arguments. Everything else is refused. Nothing is imported, and
whatever a pickle does to an Inert object is only recorded.
Imports little, and only from the standard library, since every process that reads a pickle loads
it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class Refused(Exception):  # noqa: N818  # says what happened
    """The pickle contains something that is not allowed; the message names it."""


class _SetState:
    """`__setstate__` of Inert objects: records the state. An Inert class refuses a state, which all
    its objects would share."""

    def __get__(self, inert: Inert | None, owner: type[Inert]) -> Callable[[Any], None]:
        if inert is None:
            raise Refused(f"it gives the class {owner.source} a state")
        return lambda state: setattr(inert, "state", state)


class Inert:
    """Stands for an object of a class that is not imported, or for the result of such a function.

    Records arguments, state and items, and does nothing else."""

    source = ""

    def __new__(cls, *args: Any, **options: Any) -> Inert:
        """Record the arguments."""
        self = object.__new__(cls)
        self.args, self.state, self.items = (*args, options) if options else args, None, []
        return self

    def __init__(self, *args: Any, **options: Any) -> None:
        """Nothing: `__new__` did everything."""

    def __call__(self, *args: Any) -> Inert:
        """Record a call: some protocols make objects by the result of a function."""
        return type(self)(self, *args)

    def append(self, item: Any) -> None:
        """Record an item of a subclass of list, deque or set."""
        self.items.append(item)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        """Record an item of a subclass of dict."""
        self.items.append((key, value))

    __setstate__ = _SetState()
    args: tuple[Any, ...]
    state: Any
    items: list[Any]


class Namespace(Inert):
    """argparse.Namespace: names and values."""

    source = "argparse.Namespace"


class Fixed:
    """An object that the reader itself uses, and a pickle cannot change."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"it gives a {type(self).__name__.lower()} of the reader a state")


class Dtype(Fixed):
    """A torch dtype, or the type of a storage; "untyped": bytes."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Storage(Fixed):
    """The values of tensors, which are stored outside of the pickle."""

    __slots__ = ("dtype", "key", "numel")

    def __init__(self, key: str, dtype: str, numel: int) -> None:
        self.key, self.dtype, self.numel = key, dtype, numel


class Tensor(Fixed):
    """A view of a storage."""

    __slots__ = ("dtype", "offset", "shape", "storage", "stride")

    def __init__(self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any) -> None:
        if not isinstance(storage, Storage):
            raise Refused("a tensor of something that is not a storage")
        self.storage, self.offset, self.dtype = storage, offset, dtype
        self.shape, self.stride = tuple(shape), tuple(stride)


class Call(Fixed):
    """A function that a pickle may call."""

    __slots__ = ("_function", "source")

    def __init__(self, source: str, function: Callable[..., Any]) -> None:
        self.source, self._function = source, function

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self._function(*args)


def rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Tensor:
    """torch._utils._rebuild_tensor and _v2. rest: gradient flag and hooks, ignored."""
    return Tensor(storage, offset, shape, stride, getattr(storage, "dtype", None))


def rebuild_with_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    """torch._utils._rebuild_tensor_v3, whose storage is untyped bytes."""
    if not isinstance(dtype, Dtype):
        raise Refused("a tensor without a dtype")
    return Tensor(storage, offset, shape, stride, dtype.name)


def rebuild_parameter(data: Any, *rest: Any) -> Any:
    """torch._utils._rebuild_parameter: the values of the parameter."""
    return data


def rebuild_with_attributes(function: Any, owner: Any, args: Any, state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor with attributes, such as Megatron-LM's fp32
    parameters. The attributes are dropped."""
    if not isinstance(function, Call) or getattr(owner, "source", "") not in TENSOR_TYPES:
        raise Refused("a tensor of a subclass")
    return function(*args)


def encode_text(text: Any, encoding: Any = "latin1") -> bytes:
    """_codecs.encode, as old protocols write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused("_codecs.encode of something other than latin1 text")
    return text.encode("latin1")


def member(owner: Any, name: Any) -> type[Inert]:
    """builtins.getattr: some versions of Python write members of an enum this way, and old
    protocols nested classes."""
    if not (isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str)):
        raise Refused("it asks for builtins.getattr")
    return inert_class(f"{owner.source}.{name}")


def reconstruct(owner: Any, base: Any, state: Any) -> Inert:
    """copyreg._reconstructor, as old protocols write objects."""
    if not (isinstance(owner, type) and issubclass(owner, Inert)):
        raise Refused("it asks for copyreg._reconstructor")
    return owner()


DTYPES = frozenset(
    (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64"),
        *("int32", "int16", "int8", "uint8", "bool", "uint16", "uint32", "uint64", "double"),
        *("float", "half", "long", "int", "short", "complex64", "complex128"),
    )
)
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "untyped",
}
STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")

CONTAINERS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytearray": bytearray,
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.tuple": tuple,
    "builtins.object": object,
    "torch.Size": tuple,
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": Namespace,
}
CALLS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": rebuild,
    "torch._utils._rebuild_tensor_v2": rebuild,
    "torch._utils._rebuild_tensor_v3": rebuild_with_dtype,
    "torch._tensor._rebuild_from_type_v2": rebuild_with_attributes,
    "torch._utils._rebuild_parameter": rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": rebuild_parameter,
    "_codecs.encode": encode_text,
    "builtins.getattr": member,
    "copyreg._reconstructor": reconstruct,
}
TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")

INERT = frozenset(
    (
        *TENSOR_TYPES,
        *("torch.device", "torch.serialization._get_layout", "_io.BytesIO"),
        *("pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath"),
        *("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    )
)
"""Classes and functions that become Inert objects in any file."""

ANYTHING = "*"
"""An allowed name that stands for every name, for files with more than tensors."""

MAX_NAME = 300

OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def look_up(module: str, name: str, allow: tuple[str, ...]) -> Any:
    """The stand-in for a name; raises Refused.

    allow: names that become Inert objects; one that ends in a dot is a prefix, ANYTHING is all."""
    module = OLD_MODULES.get(module, module)
    full = f"{module}.{name}"
    if full in CONTAINERS:
        return CONTAINERS[full]
    if full in CALLS:
        return Call(full, CALLS[full])
    if module in STORAGE_MODULES and name in STORAGES:
        return Dtype(STORAGES[name])
    if module == "torch" and name in DTYPES:
        return Dtype(name)
    if full in INERT or any(_allows(entry, full) for entry in allow):
        return inert_class(full)
    raise Refused(f"it asks for {full}, which no file of tensors needs")


def inert_class(full: str) -> type[Inert]:
    """An Inert class for one name."""
    if len(full) > MAX_NAME or not all(part.isidentifier() for part in full.split(".")):
        raise Refused(f"it asks for {full!a:.80}, which is not the name of a class or function")
    return type("Inert", (Inert,), {"source": full})


def _allows(entry: str, full: str) -> bool:
    return entry in (ANYTHING, full) or (entry[-1] == "." and full.startswith(entry))
