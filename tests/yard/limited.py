"""A limit of one training at a time, on a real server."""

from __future__ import annotations

from flows.yard.profile import limit_tag
from tests.yard.operator.deployed import Api

LIMIT = f"tag:{limit_tag('local', 'pretrain')}"
"""The one that profile `local` has."""


def limit_training(url: str) -> None:
    """Let one training at a time run in yard `local`, by the server of this API."""
    wanted = {"tag": LIMIT.removeprefix("tag:"), "concurrency_limit": 1}
    Api(url).ask("concurrency_limits/", wanted)


def taken(url: str) -> int:
    """Slots of trainings that are taken."""
    return int(Api(url).ask(f"v2/concurrency_limits/{LIMIT}")["active_slots"])
