"""Pickles of others: what they ask for is refused by name, and never runs.

tests/trainyard/conversion/torch_save has the limits of the reader and of archives."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainyard.conversion.torch_save.pickle_names import ANYTHING
from trainyard.conversion.torch_save.pickles import Recorded, unpickle
from trainyard.errors import ArtifactError

pytestmark = pytest.mark.slow

TOUCH = "touch {}"
CODE = "open('{}', 'w')"

CALLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("os", "system", (TOUCH,)),
    ("posix", "system", (TOUCH,)),
    ("os", "popen", (TOUCH,)),
    ("os", "execv", ("/bin/touch", ["touch", "{}"])),
    ("posix", "posix_spawn", ("/bin/touch", ["touch", "{}"], {})),
    ("subprocess", "Popen", (["touch", "{}"],)),
    ("subprocess", "check_output", (["touch", "{}"],)),
    ("pty", "spawn", (["touch", "{}"],)),
    ("builtins", "eval", (CODE,)),
    ("builtins", "exec", (CODE,)),
    ("__builtin__", "eval", (CODE,)),
    ("builtins", "open", ("{}", "w")),
    ("builtins", "compile", (CODE, "x", "eval")),
    ("builtins", "__import__", ("antigravity",)),
    ("builtins", "breakpoint", ()),
    ("io", "open", ("{}", "w")),
    ("_io", "FileIO", ("{}", "w")),
    ("pathlib", "Path.touch", ("{}",)),
    ("importlib", "import_module", ("antigravity",)),
    ("runpy", "run_path", ("{}",)),
    ("runpy", "_run_code", (CODE, {})),
    ("timeit", "timeit", (CODE,)),
    ("code", "interact", ()),
    ("pdb", "run", (CODE,)),
    ("cProfile", "run", (CODE,)),
    ("bdb", "Bdb.run", (CODE,)),
    ("shutil", "copy", ("/etc/passwd", "{}")),
    ("shutil", "rmtree", ("{}",)),
    ("ctypes", "CDLL", ("libc.so.6",)),
    ("socket", "create_connection", (("127.0.0.1", 1),)),
    ("urllib.request", "urlopen", ("http://127.0.0.1:1",)),
    ("webbrowser", "open", ("http://127.0.0.1:1",)),
    ("asyncio", "create_subprocess_shell", (TOUCH,)),
    ("multiprocessing.util", "spawnv_passfds", (b"/bin/touch", ["touch", "{}"], [])),
    ("pickle", "loads", (b"cos\nsystem\n(S'touch {}'\ntR.",)),
    ("torch", "load", ("{}",)),
    ("torch.serialization", "load", ("{}",)),
    ("torch.hub", "load", ("evil/repository", "x")),
    ("torch.jit", "load", ("{}",)),
    ("torch._dynamo.utils", "import_submodule", ("os",)),
    ("numpy", "load", ("{}",)),
    ("numpy.testing._private.utils", "runstring", (CODE, {})),
    ("functools", "partial", ("x",)),
    ("operator", "attrgetter", ("__class__.__base__",)),
    ("builtins", "getattr", ("x", "__class__")),
    ("types", "FunctionType", ("x",)),
    ("sys", "exit", (0,)),
    ("os", "_exit", (0,)),
    ("signal", "raise_signal", (9,)),
    ("faulthandler", "_sigsegv", ()),
]


def filled(value: Any, witness: str) -> Any:
    """The arguments, with a path in the place of {}."""
    if isinstance(value, str):
        return value.replace("{}", witness)
    if isinstance(value, bytes):
        return value.replace(b"{}", witness.encode())
    kind = type(value)
    return kind(filled(one, witness) for one in value) if kind in (list, tuple) else value


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}.{call[1]}")
def test_a_call_is_refused_by_name_and_never_made(
    call: tuple[str, str, tuple[Any, ...]], tmp_path: Path
) -> None:
    module, name, arguments = call
    witness = tmp_path / "ran"
    given = filled(arguments, str(witness))
    words = pickle.dumps(given, 2)[2:-1]
    text = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name))
    data = b"\x80\x04" + text + b"\x93" + words + b"R."
    with pytest.raises(ArtifactError, match=rf"file\.pt: .*{name.split('.')[0]}"):
        unpickle(data, "file.pt")
    with suppress(ArtifactError):
        assert isinstance(unpickle(data, "file.pt", allow=[ANYTHING]).tree, Recorded)
    assert not list(tmp_path.iterdir())
