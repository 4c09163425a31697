"""Run a stage in this process: its work without the command line, for tests of what it makes; or
the command line, for tests of what it says, in a tenth of the time that a process takes to start.

What is about signals, exit codes, or what a process imports, is tested with processes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from stages.runtime.context import StageRun
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.config import digest_relevant, from_dict
from trainyard.logging import OURS


def run_directly(
    config_class: type, run: Callable[[Any, StageRun], dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """The metrics of `run`; options are flat keys. What a failed run keeps for a next one stays."""
    config = from_dict(config_class, options)
    inputs = {name: resolve(name, urls) for name, urls in config.inputs().items() if urls}
    known = [digest_relevant(config), {name: i.digest for name, i in inputs.items()}]
    stage = StageRun("test", inputs, config.output(), digest_document(known))
    with contextlib.closing(stage):
        metrics = run(config, stage)
        stage.work.remove()
        return metrics


@dataclass(frozen=True, slots=True)
class Done:
    """How a command line ended."""

    status: int
    out: str
    err: str


def run_program(module: str, *words: str, expect: int | None = None) -> Done:
    """What `python -m MODULE WORDS...` would print and exit with; `expect`: the status it has."""
    out, err = io.StringIO(), io.StringIO()
    with (
        _process_left_as_it_was(),
        mock.patch.object(sys, "argv", [module, *words]),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status: Any = 0
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int)
    assert expect in (None, status), err.getvalue()
    return Done(status, out.getvalue(), err.getvalue())


def run_process(
    module: str,
    *words: str,
    expect: int = 0,
    launcher: Sequence[str] = (sys.executable,),
    seconds: float = 120,
    **environment: str,
) -> str:
    """What `LAUNCHER -m MODULE WORDS...` prints as a process of its own that ends so."""
    done = subprocess.run(
        [*launcher, "-m", module, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} seconds in vain"
        time.sleep(0.02)


def wait_for_line(process: subprocess.Popen[str], words: str, count: int = 1) -> None:
    """Read what a process prints until so many lines have these words."""
    assert process.stdout is not None
    for line in process.stdout:
        count -= words in line
        if count == 0:
            return
    raise AssertionError(f"it ended without {words!r}")


def torchrun(*options: str) -> tuple[str, ...]:
    """A launcher of ranks, for run_process."""
    return (sys.executable, "-m", "torch.distributed.run", *options)


@contextlib.contextmanager
def _process_left_as_it_was() -> Iterator[None]:
    """A program sets up logging, handlers of signals and variables for itself alone."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, OURS)]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    root.handlers = []  # or those of pytest would be closed
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        logging.captureWarnings(False)
        root.handlers = handlers
        for logger, level in zip(loggers, levels, strict=True):
            if logger.level != level:  # setting it makes every logger forget what it knows
                logger.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)
