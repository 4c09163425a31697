"""The end of a process that is one rank of several, or that a signal stopped.

torch's communication threads may outlive Python: such a thread of gloo that lets go of a tensor
while Python ends aborts the process, and one that waits for a rank which is gone holds its end up.
A thread that is in a library when the process is stopped, such as SentencePiece's, does the same.
So these end at once when all that they owe is done."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn

from trainyard.errors import EXIT_DEFECT


def is_one_of_several() -> bool:
    """Whether this process talked to other ranks, or began to."""
    return "torch.distributed" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1"


def exit_now(status: int) -> NoReturn:
    """End with what others registered for the end, and with all output written."""
    try:
        atexit._run_exitfuncs()  # loggers, worker processes
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        logging.getLogger(__name__).exception("at the end of the process")
        status = status or EXIT_DEFECT
    finally:
        os._exit(status)
