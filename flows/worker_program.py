"""Prefect's `worker start`, which says in one line that its server is away, and in one that it is
back.

Prefect alone prints a traceback from each of its loops, stops listening for cancelled runs after
half a minute, and ends after some minutes. Here the loops go on until the server answers.
flows.worker starts this program."""

from __future__ import annotations

import sys

from prefect._internal import observers
from prefect.runner import _scheduled_run_poller
from prefect.workers import base

from flows.logs.outage import be_patient, say


def main() -> None:
    """Run Prefect's command with the arguments of this program."""
    from prefect.cli import app

    be_patient(say, (observers, _scheduled_run_poller, base))
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
