"""A store that answered before and is away now is waited for; one that never did is not."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.yard.faults.wire import Wire
from trainyard.artifacts import claim, conditional, retry, store
from trainyard.errors import ClaimHeldError, InfrastructureError

AWAY_SECONDS = 1.0
"""After somebody began to wait."""

pytestmark = pytest.mark.slow


@pytest.fixture
def wire(s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Wire:
    """To the store of the tests, with an object `here` behind it."""
    wire = Wire(s3_settings["AWS_ENDPOINT_URL"].replace("http://", "tcp://"))
    for name, value in (s3_settings | {"AWS_ENDPOINT_URL": f"http://{wire.address}"}).items():
        monkeypatch.setenv(name, value)
    return wire


@pytest.fixture
def folder(wire: Wire, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"s3://yard-tests/{tmp_path_factory.mktemp('patience').name}-{time.time_ns()}"
    conditional.put_if_absent(f"{url}/here", b"all of it")
    yield url
    wire.mend()
    store.delete_tree(url)


def when_waited_for(then: Callable[[], object]) -> None:
    """Do something a while after somebody began to wait for the store."""

    def watch() -> None:
        while not retry._unavailable_since:
            time.sleep(0.02)
        time.sleep(AWAY_SECONDS)
        then()

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.parametrize("what", ["read", "seek", "list", "write", "create", "replace"])
def test_whatever_a_stage_asks_for_is_asked_until_the_store_is_back(
    what: str, wire: Wire, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, retry.__name__)
    _, version = conditional.read_version(f"{folder}/here") or (b"", "")
    with retry.waiting(), store.open_input(f"{folder}/here") as opened:
        wire.cut()
        when_waited_for(wire.mend)
        if what == "read":
            assert store.read_bytes(f"{folder}/here") == b"all of it"
        elif what == "seek":
            opened.seek(-5, 2)
            assert opened.read() == b"of it"
        elif what == "list":
            assert store.list_files(folder) == {"here": 9}
        elif what == "write":
            with store.OutputFile(f"{folder}/there", "there", False) as file:
                file.write(b"new")
            assert store.read_bytes(f"{folder}/there") == b"new"
        elif what == "create":
            assert conditional.put_if_absent(f"{folder}/there", b"new")
        else:
            assert conditional.replace_if_match(f"{folder}/here", b"new", version)
    assert wire.refused, "nothing was asked while it was away"
    away, back = caplog.messages
    assert away.startswith(
        f"the store at http://{wire.address} does not answer; waiting up to 60 s"
    )
    assert "answers again after" in back


def test_all_threads_wait_for_the_same_store_and_one_says_so(
    wire: Wire, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[bytes] = []
    with retry.waiting():
        wire.cut()
        threads = [
            threading.Thread(target=lambda: read.append(store.read_bytes(f"{folder}/here")))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        when_waited_for(wire.mend)
        for thread in threads:
            thread.join()
    assert read == [b"all of it"] * 4
    assert len([said for said in caplog.messages if "does not answer" in said]) == 1


def test_patience_ends_and_is_not_had_twice_for_one_outage(
    wire: Wire, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_SECONDS", 6.0)
    seconds = []
    with retry.waiting():
        wire.cut()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(InfrastructureError, match="the store cannot be reached"):
                store.read_bytes(f"{folder}/here")
            seconds.append(time.monotonic() - began)
    assert seconds[0] >= 6 > seconds[1]


def test_a_store_that_never_answered_is_not_waited_for(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.cut()
    with retry.waiting(), pytest.raises(InfrastructureError, match="cannot be reached"):
        store.read_bytes("s3://yard-tests/here")
    assert wire.refused
    assert not caplog.messages


def test_who_asks_for_a_person_or_again_by_himself_is_answered_at_once(
    wire: Wire, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    wire.cut()
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        store.read_bytes(f"{folder}/here")
    with (
        retry.waiting(),
        retry.no_retry(),
        pytest.raises(InfrastructureError, match="cannot be reached"),
    ):
        store.read_bytes(f"{folder}/here")
    assert not caplog.messages


def test_a_process_that_must_end_waits_no_longer(wire: Wire, folder: str) -> None:
    with retry.waiting():
        wire.cut()
        when_waited_for(retry.give_up)
        began = time.monotonic()
        with pytest.raises(InfrastructureError):
            store.read_bytes(f"{folder}/here")
        assert time.monotonic() - began < retry.RETRY_SECONDS / 2


def test_a_claim_is_not_taken_over_because_its_holder_met_the_same_outage(
    wire: Wire, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "STALE_SECONDS", 1.5 * AWAY_SECONDS)
    monkeypatch.setattr(claim, "UNAVAILABLE_SECONDS", 0.8 * AWAY_SECONDS)
    url = f"{folder}/.claim.json"
    holder = dataclasses.replace(claim.Holder.of_this_process(), machine="another", run="other")
    conditional.put_if_absent(url, holder.encode(0))
    asked: list[str] = []

    def cut_at_the_second_look(operation: str, url: str) -> None:
        if operation == "create":
            asked.append(url)
            if len(asked) == 2:
                wire.cut()
                when_waited_for(wire.mend)

    monkeypatch.setattr(store, "observers", [cut_at_the_second_look])
    with retry.waiting(), pytest.raises(ClaimHeldError, match="another run is writing"):
        claim.acquire(url, AWAY_SECONDS)
    assert len(asked) == 2
