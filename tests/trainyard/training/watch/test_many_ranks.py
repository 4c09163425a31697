"""The hang report of many ranks, played on a store without their processes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainyard.errors import InfrastructureError
from trainyard.training.loop.state import TrainState
from trainyard.training.watch.hang import HangWatch, RankPosition
from trainyard.training.watch.rank_mailbox import LocalMailbox, StoreMailbox


def wait_for(ended: list[InfrastructureError]) -> None:
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)


class CountedMailbox(StoreMailbox):
    """Counts its requests to the store."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.reads = 0

    def read(self, name: str) -> str | None:
        self.reads += 1
        return super().read(name)


@pytest.mark.slow
def test_of_ten_thousand_ranks_the_one_behind_is_named_with_few_requests(tmp_path: Path) -> None:
    world, behind = 10_000, 7321
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mailbox = CountedMailbox(store)
    for rank in range(1, world):  # all but the collector have answered
        waits = rank != behind
        position = RankPosition(rank, 100, "all_reduce" if waits else "read_a_broken_disk", waits)
        mailbox.append("positions", json.dumps(asdict(position)) + "\n")
    ended: list[InfrastructureError] = []
    watch = HangWatch(0, world, mailbox, tmp_path, 0.1 / 60, end=ended.append, poll_seconds=0.02)
    watch._poll = 0.02  # as if it had been ten seconds
    watch.begin(TrainState(step=100))
    wait_for(ended)
    reads = mailbox.reads
    watch.end()
    assert f"rank {behind} is behind, after step 100 in read_a_broken_disk" in str(ended[0])
    assert "does not answer" not in str(ended[0])
    assert mailbox.read("report") == str(ended[0])
    assert reads < 100


def test_a_second_rank_with_an_alarm_logs_the_report_of_the_first(tmp_path: Path) -> None:
    ended: list[InfrastructureError] = []
    mailbox = LocalMailbox()
    assert mailbox.claim("hang", "7") == "7"
    mailbox.put("report", "rank 3 is behind")
    watch = HangWatch(8, 9, mailbox, tmp_path, end=ended.append, poll_seconds=0.02)
    watch.begin(TrainState(step=2))
    wait_for(ended)
    watch.end()
    assert str(ended[0]) == "rank 3 is behind"
