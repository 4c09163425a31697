"""What all fuzz targets share.

A target is a script: `python tests/fuzz/fuzz_NAME.py -max_total_time=60 [FOLDER]` looks for inputs
that make its function raise anything; FOLDER keeps what was found interesting. An input may take
ten seconds and two gigabytes. A crash is left as `crash-*` in the current folder; the script with
that file as its argument runs it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import atheris

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=16384")


_folders: list[str] = []


def scratch() -> Path:
    """A folder for the files of this run, in memory where the machine has such a place."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    _folders.append(tempfile.mkdtemp(prefix="fuzz-", dir=place))
    return Path(_folders[-1])


def fuzz(target: Callable[[bytes], None], seeds: Iterable[bytes] = ()) -> NoReturn:
    """Run a target by the command line of libFuzzer, beginning with `seeds`, and exit."""
    folder = scratch()
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    child = os.fork()  # libFuzzer leaves without a word, so somebody else must clean up
    if child == 0:
        given = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        # A file is an input to be run again; folders are where inputs are taken from.
        inputs = given if any(map(os.path.isfile, given)) else [*given, str(folder)]
        atheris.Setup([sys.argv[0], *LIMITS, *options, *inputs], target)
        atheris.Fuzz()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    for each in _folders:
        shutil.rmtree(each, ignore_errors=True)
    sys.exit(os.waitstatus_to_exitcode(status) and 1)


@contextlib.contextmanager
def only(*allowed: type[Exception]) -> Iterator[None]:
    """Pass over the errors that a damaged input may raise; anything else is a find."""
    with contextlib.suppress(*allowed):
        yield
