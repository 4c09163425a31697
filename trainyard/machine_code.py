"""Functions compiled to machine code, for loops over bytes or indices that numpy has no call for.

numba compiles; the result is kept as an object file, which llvmlite alone loads: numba takes 0.3 s
and 90 MB to import. A function gets arrays and numbers and allocates nothing. It runs without
Python's lock, so threads may run the functions at the same time; division by zero raises nothing.

A file of the cache: a line of JSON (what it was made of, the function's name, its arguments, the
digest of the rest), and the object file."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite
import numpy as np
from llvmlite import binding

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

HOW: dict[str, Any] = {
    "error_model": "numpy",
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
SCALARS: dict[str, Any] = {
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "uint8": ctypes.c_uint8,
    "float64": ctypes.c_double,
    "none": ctypes.c_void_p,
}
LOADING = threading.Lock()
ENGINES: list[Any] = []
"""They own the code that was loaded."""
INSIDE: set[Callable[..., Any]] = set()
KNOWN_TO_NUMBA: set[Callable[..., Any]] = set()


def compiled_inside(function: F) -> F:
    """Let compiled functions call this one; it is compiled as a part of them."""
    INSIDE.add(function)
    return function


def zeros_below(bits: Any) -> int:
    """How many zeros a u64 ends with; 64 if it is 0. In compiled functions, one instruction."""
    given = int(bits)
    return (given & -given).bit_length() - 1 if given else 64


class Argument(NamedTuple):
    """What a function is given."""

    dtype: str
    ndim: int | None
    """None: a number."""
    is_contiguous: bool


class Code(NamedTuple):
    """A compiled function."""

    name: str
    """Of its symbol."""
    arguments: tuple[Argument, ...]
    result: str
    content: bytes
    """The object file."""


def machine_code(signature: str) -> Callable[[F], F]:
    """Compile a function, when it is first called, for arguments of these types, in numba's
    notation. Its code is kept beside the source or in the user's cache folder, if one can be
    written to, and made anew if anything that it contains has changed."""

    def compiled(function: F) -> F:
        return cast(F, Compiled(function, signature))

    return compiled


class Compiled:
    """A function as machine code. `py_func`: what it was compiled from."""

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.py_func, self._signature = function, signature
        self._call: Callable[..., Any] | None = None

    def __call__(self, *given: Any) -> Any:
        """Run it; TypeError for arrays of other kinds than it was compiled for."""
        return (self._call or self.load())(*given)

    def load(self) -> Callable[..., Any]:
        """Find it in the cache, or compile it."""
        with LOADING:
            if self._call is None:
                self._call = _loaded(_found(self.py_func, self._signature))
        return self._call


# --- loading ----------------------------------------------------------------------------------


def _loaded(code: Code) -> Callable[..., Any]:
    """Bring the code into memory; what calls it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code.content))
    engine.finalize_object()
    ENGINES.append(engine)
    result_type = SCALARS[code.result]
    types = [ctypes.c_void_p, ctypes.c_void_p]
    for argument in code.arguments:
        types += [SCALARS[argument.dtype]] if argument.ndim is None else _array_types(argument.ndim)
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *types)(engine.get_function_address(code.name))

    dtypes = [np.dtype(argument.dtype) for argument in code.arguments]

    def call(*given: Any) -> Any:
        result, error = result_type(), ctypes.c_void_p()
        words: list[Any] = []
        for one, argument, dtype in zip(given, code.arguments, dtypes, strict=True):
            words += [one] if argument.ndim is None else _array_words(one, argument, dtype)
        status = function(ctypes.addressof(result), ctypes.addressof(error), *words)
        assert status == 0, "nothing in these functions raises"
        return result.value

    return call


def _array_types(ndim: int) -> list[Any]:
    """Of numba's fields of an array: its memory's owner, its parent, the number of items, the size
    of one, the address, the shape, the strides."""
    return (
        [ctypes.c_void_p] * 2
        + [ctypes.c_int64] * 2
        + [ctypes.c_void_p]
        + [ctypes.c_int64] * 2 * ndim
    )


def _array_words(given: Any, argument: Argument, dtype: np.dtype[Any]) -> list[Any]:
    is_right = given.dtype == dtype and given.ndim == argument.ndim
    if not is_right or (argument.is_contiguous and not given.flags.c_contiguous):
        raise TypeError(f"{given.dtype} of {given.ndim} axes, {given.strides}; not {argument}")
    place = given.ctypes.data
    return [None, None, given.size, given.itemsize, place, *given.shape, *given.strides]


# --- the cache --------------------------------------------------------------------------------


def _found(function: Callable[..., Any], signature: str) -> Code:
    """From the cache, or compiled."""
    made_of = _made_of(function, signature)
    name = f"{function.__module__}.{function.__qualname__}-{made_of['machine'][:8]}.code"
    folders = _folders(function)
    for folder in folders:
        code = _read(folder / name, made_of)
        if code is not None:
            return code
    code = _compile(function, signature)
    if not any(_write(folder / name, made_of, code) for folder in folders):
        log.info("%s is compiled at each start: no folder can be written to", name)
    return code


def _made_of(function: Callable[..., Any], signature: str) -> dict[str, str]:
    """What decides about the machine code."""
    machine, tools = _machine_and_tools()
    how = repr((signature, sorted(HOW.items()), tools))
    return {"machine": machine, "code": _digest_of(function), "how": how}


@cache
def _machine_and_tools() -> tuple[str, tuple[Any, ...]]:
    features = binding.get_host_cpu_features().flatten()
    machine = f"{binding.get_host_cpu_name()} {features}".encode()
    tools = (version("numba"), llvmlite.__version__, *sys.version_info[:2])
    return sha256(machine).hexdigest(), tools


def _digest_of(function: Callable[..., Any]) -> str:
    """Digest of the files of a function and of those that it calls, and of the values that they
    name."""
    digest = sha256(Path(function.__code__.co_filename).read_bytes())
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value in INSIDE:
            digest.update(_digest_of(value).encode())
        elif isinstance(value, np.ndarray | np.generic | int | float | str | bytes | tuple):
            digest.update(repr((name, value)).encode())
    return digest.hexdigest()


def _folders(function: Callable[..., Any]) -> list[Path]:
    """Where code may be: a folder of the environment alone, or beside the source, or the user's."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(given)]
    # Unlike Path.home, this fails for no user without an entry in passwd.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(function.__code__.co_filename).parent / "__pycache__", Path(home, "trainyard")]


def _read(path: Path, made_of: dict[str, str]) -> Code | None:
    """None for code of another source or machine, and for a file that is not whole."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        found = json.loads(head)
        digest = found.pop("digest")
        if found["made_of"] != made_of or digest != _sum_of(found, content):
            return None
        arguments = tuple(Argument(*one) for one in found["arguments"])
        return Code(found["name"], arguments, found["result"], content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _sum_of(facts: dict[str, Any], content: bytes) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode() + content).hexdigest()


def _write(path: Path, made_of: dict[str, str], code: Code) -> bool:
    """Whether it could be kept there."""
    facts: dict[str, Any] = {**code._asdict(), "made_of": made_of}
    del facts["content"]
    facts = json.loads(json.dumps(facts))  # as they are read again
    facts["digest"] = _sum_of(facts, code.content)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(json.dumps(facts).encode() + b"\n" + code.content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        return False
    return True


# --- compiling --------------------------------------------------------------------------------


def _compile(function: Callable[..., Any], signature: str) -> Code:
    """By numba, in some seconds."""
    from numba import njit
    from numba.core import entrypoints, types
    from numba.extending import register_jitable

    # numba would load what other packages bring for their own types: awkward, which comes with
    # gigatoken, takes 0.3 s and 45 MB, and no function here has such arguments.
    entrypoints._already_initialized = True
    _let_zeros_be_counted()
    for inner in INSIDE - KNOWN_TO_NUMBA:
        register_jitable(**HOW)(inner)
        KNOWN_TO_NUMBA.add(inner)
    compiled = njit(**HOW)(function)
    compiled.compile(signature)
    (found,) = compiled.overloads.values()
    arguments = tuple(
        Argument(str(one.dtype), one.ndim, one.layout == "C")
        if isinstance(one, types.Array)
        else Argument(str(one), None, True)
        for one in found.signature.args
    )
    content = found.library._get_compiled_object()
    return Code(found.fndesc.llvm_func_name, arguments, str(found.signature.return_type), content)


@cache
def _let_zeros_be_counted() -> None:
    """Teach numba `zeros_below`."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic, overload

    @intrinsic
    def count(context: Any, bits: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.cttz(given[0], ir.Constant(ir.IntType(1), 0))

        return types.int64(types.uint64), code

    counted: Any = count
    known: Any = overload(zeros_below)
    known(lambda bits: lambda bits: counted(bits))
