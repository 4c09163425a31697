"""One writer: a claim is exclusive, is renewed, and outlives nobody for long."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from trainyard.artifacts import claim, conditional, store
from trainyard.errors import ClaimHeldError


def test_a_second_run_is_told_who_holds_the_claim(store_url: str) -> None:
    url = store.join(store_url, ".claim.json")
    held = claim.acquire(url, 0)
    with pytest.raises(ClaimHeldError, match="another run is writing this output: process"):
        claim.acquire(url, 0)
    held.release()
    assert not store.exists(url)
    claim.acquire(url, 0).release()


def test_the_claim_of_a_dead_process_is_taken_over_at_once(store_url: str) -> None:
    url = store.join(store_url, ".claim.json")
    script = (
        "import os, sys; from trainyard.artifacts import claim; "
        "claim.acquire(sys.argv[1], 0); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, url], check=False)
    assert store.exists(url)
    claim.acquire(url, 0).release()
    assert not store.exists(url)


@pytest.mark.slow
def test_a_claim_that_stands_still_is_taken_over(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "STALE_SECONDS", 0.3)
    url = store.join(store_url, ".claim.json")
    elsewhere = dataclasses.replace(claim.Holder.of_this_process(), machine="another", run="other")
    conditional.put_if_absent(url, elsewhere.encode(0))
    claim.acquire(url, 10).release()


@pytest.mark.slow
def test_a_claim_that_beats_is_not_taken_over(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(claim, "STALE_SECONDS", 1.0)
    url = store.join(store_url, ".claim.json")
    held = claim.acquire(url, 0)
    with pytest.raises(ClaimHeldError):
        claim.acquire(url, 2.0)
    assert not held.lost
    held.release()
