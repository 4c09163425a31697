"""Prefect's `worker start`, which prints one line when its server is away and one when it is back.

Prefect alone prints a traceback from each of its loops, stops listening for cancelled runs after
half a minute, and ends after some minutes. Here the loops continue until the server answers.
`command` starts this program."""

from __future__ import annotations

import sys

from prefect._internal import observers
from prefect.runner import _scheduled_run_poller
from prefect.workers import base

from flows.server.outage import print_line, tolerate_outages


def main() -> None:
    """Run Prefect's command with the arguments of this program."""
    from prefect.cli import app

    tolerate_outages(print_line, (observers, _scheduled_run_poller, base))
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
