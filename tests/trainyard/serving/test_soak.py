"""Random requests, cancels and disconnects: nothing fails, and nothing stays in use."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from benchmarks.soak import Traffic, growth, held_at_the_end
from tests.trainyard.serving.running import Running


@pytest.mark.slow
def test_clients_that_leave_hurt_no_other_one_and_leave_no_block(server: Running) -> None:
    async def work() -> tuple[Traffic, dict[str, float]]:
        async with aiohttp.ClientSession() as session:
            sizes = {"prompt_tokens": (1, 24), "new_tokens": (1, 40)}
            traffic = Traffic(server.url, session, seed=2, **sizes)
            await traffic.run(rate=20.0, seconds=4.0)
            return traffic, await held_at_the_end(session, server.url)

    traffic, in_use = asyncio.run(work())
    assert not traffic.found.errors
    assert set(in_use.values()) == {0.0}
    ends = traffic.found.ends
    assert min(ends[f"{kind} done"] for kind in ("stream", "plain", "megatron")) > 0
    assert sum(count for end, count in ends.items() if end.endswith("left")) > 0


def test_growth_is_from_the_second_tenth_to_the_last() -> None:
    samples = [1, 1, *[100] * 2, *[500] * 14, *[102] * 2]
    assert growth(samples) == (100, 102, pytest.approx(0.02))
