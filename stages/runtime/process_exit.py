"""Ends a process at once, if it is one rank of several or a signal stopped it.

torch's communication threads may outlive Python: a gloo thread that frees a tensor while Python
ends aborts the process, and one that waits for a lost rank delays the end. A thread inside a
library, such as SentencePiece's, does the same. So these processes exit right after cleanup."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from typing import NoReturn

from trainyard.errors import EXIT_DEFECT


def is_one_of_several() -> bool:
    """Whether this process communicated with other ranks, or started to."""
    return "torch.distributed" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1"


def exit_now(status: int) -> NoReturn:
    """Run registered exit functions, flush all output, and exit."""
    try:
        atexit._run_exitfuncs()  # loggers, worker processes
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        logging.getLogger(__name__).exception("error at process exit")
        status = status or EXIT_DEFECT
    finally:
        os._exit(status)


def reader_is_gone() -> int:
    """The exit status after a BrokenPipeError: the reader of our output closed the pipe, as in
    `--help | head`. What is still to be written is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
