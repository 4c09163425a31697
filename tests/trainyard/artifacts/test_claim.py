"""One writer: a claim is exclusive, is renewed, and outlives nobody for long."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys

import pytest

from trainyard.artifacts import claim, conditional, store
from trainyard.errors import ClaimHeldError, InfrastructureError


def test_the_error_of_a_second_run_names_the_holder_of_the_claim(store_url: str) -> None:
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


def test_a_claim_that_cannot_be_renewed_says_so_once_a_minute_and_that_it_can_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, claim.__name__)
    failures = claim.RenewalLog("/yard/.claim.json")
    failures.succeeded()
    for _ in range(3):
        failures.failed(InfrastructureError("No space left on device"))
    (once,) = caplog.messages
    assert once.startswith("could not renew the claim, trying again every 5 s; after 30 s another")
    assert once.endswith("No space left on device")
    monkeypatch.setattr(claim, "WARN_SECONDS", 0.0)
    failures.failed(InfrastructureError("No space left on device"))
    assert caplog.messages[1].startswith("could not renew the claim for 0 s, trying again")
    failures.succeeded()
    failures.succeeded()
    assert caplog.messages[2:] == ["the claim /yard/.claim.json can be renewed again"]


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
