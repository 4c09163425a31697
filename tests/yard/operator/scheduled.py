"""Schedules of seconds, and what comes of them."""

from __future__ import annotations

from typing import Any

from tests.yard.operator.deployed import ENDED, Api, comes

ARRIVALS = """
corpus = ["{folder}/arrivals/*.jsonl"]

[tokenize]
tokenizer_type = "ByteLevelTokenizer"
append_eod = true
"""
"""A recipe of a corpus that grows."""
OFFERED = 'deployments = ["corpus-refresh"]\n'
ONE_AT_A_TIME = "\n[pool]\nconcurrency_limit = 1\n"
"""A flow takes longer to start than such a schedule waits."""


def every(seconds: int, **parameters: str) -> str:
    """The table of a profile that refreshes a corpus each so many seconds; a sixth field of cron,
    which Prefect takes, is one of seconds."""
    given = ", ".join(f'{name} = "{value}"' for name, value in parameters.items())
    return (
        f'\n[schedules.corpus-refresh]\ncron = "* * * * * */{seconds}"\n'
        f"parameters = {{ {given} }}\n"
    )


def first_of(api: Api, deployment: str, seconds: float) -> dict[str, Any] | None:
    """The first run of FLOW/YARD that has ended; None when none does in time."""
    there = api.ask(f"deployments/name/{deployment}")["id"]
    ended = {
        "deployments": {"id": {"any_": [there]}},
        "flow_runs": {"state": {"type": {"any_": list(ENDED)}}},
        "sort": "EXPECTED_START_TIME_ASC",
    }
    comes(seconds, lambda: api.ask("flow_runs/filter", ended))
    return next(iter(api.ask("flow_runs/filter", ended)), None)


def pause(api: Api, deployment: str) -> None:
    """Plan no more runs of it."""
    there = api.ask(f"deployments/name/{deployment}")["id"]
    api.ask(f"deployments/{there}", {"paused": True}, "PATCH")
