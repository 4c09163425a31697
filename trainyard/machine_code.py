"""Functions that numba compiles, for loops over bytes or indices that numpy has no call for.

Importing numba takes half a second and 90 MB: import a module that uses this where there is much
to do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from hashlib import sha256
from inspect import getsourcefile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import entrypoints
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.registry import cpu_target
from numba.core.runtime import nrtdynmod
from numba.core.runtime.nrt import rtsys

# numba would load what other packages bring for their own types: awkward, which comes with
# gigatoken, takes 0.3 s and 45 MB, and no function here has such arguments.
entrypoints._already_initialized = True


class _RuntimeWhenCompiling(type(rtsys)):  # type: ignore[misc]
    """numba's functions that count references. numba compiles them when it loads any function, for
    0.1 s and 20 MB of LLVM; a function from the cache contains what it needs of them."""

    _library: Any

    @property
    def library(self) -> Any:
        """As numba's, for linking."""
        if self._library is None:
            self._library = _compile_runtime(cpu_target.target_context)
        return self._library


_compile_runtime: Callable[[Any], Any] = nrtdynmod.compile_nrt_functions
nrtdynmod.compile_nrt_functions = lambda context: None
rtsys.__class__ = _RuntimeWhenCompiling


class _Cache(FunctionCache):
    """Of one function here. It can call nothing of numpy's linear algebra or random numbers."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Take it from the cache. numba's own method first prepares to compile, for 0.2 s; its
        compiler does that too, for a function that is not in the cache."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """numba's key, and the code of what is compiled into the function from other files."""
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return *key, _code_inside(self._py_func)


def _code_inside(function: Any) -> str:
    """Digest of the files of functions that a compiled one calls, of those that they call, and of
    the values that they name."""
    digest = sha256()
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, Dispatcher | _Intrinsic):
            digest.update(Path(getsourcefile(sys.modules[called.__module__]) or "").read_bytes())
        if isinstance(called, Dispatcher):
            digest.update(_code_inside(called.py_func).encode())
        elif isinstance(called, np.ndarray | np.generic | int | float | str | bytes | tuple):
            digest.update(repr((name, called)).encode())
    return digest.hexdigest()


log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

HOW: dict[str, Any] = {"error_model": "numpy", "nogil": True}
"""Division by zero raises nothing; threads may run the functions at the same time."""


def compiled_inside(function: F) -> F:
    """Let compiled functions call this one; it is compiled as a part of them."""
    return cast(F, njit(function))


def _cached(signature: Any, function: Callable[..., Any]) -> Any:
    compiled = njit(**HOW)(function)
    compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    compiled.compile(signature)
    compiled.disable_compile()
    return compiled


def machine_code(signature: Any) -> Callable[[F], F]:
    """Compile a function for arguments of these types, in numba's notation. numba keeps the code
    for later processes beside the source or in the user's cache folder, if it may write to one."""

    def compiled(function: F) -> F:
        try:
            return cast(F, _cached(signature, function))
        # No folder to write to; a full disk; a file that a crash has cut short.
        except (RuntimeError, OSError, EOFError, ValueError, UnpicklingError) as error:
            log.info("%s is compiled anew, its cache cannot be used: %s", function.__name__, error)
            return cast(F, njit(signature, **HOW)(function))

    return compiled
