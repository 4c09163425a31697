"""What a store can do, found out by doing it; stores that do one thing wrong are found out."""

from __future__ import annotations

import os
import time

import pytest

from tests.faulty_s3 import Faults, gateway
from trainyard.artifacts import store
from trainyard.artifacts.store_probe import check_reachable, is_open_to_all, probe, seconds_ahead
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError, InfrastructureError

pytestmark = pytest.mark.slow


def test_an_honest_store_passes_and_keeps_nothing(store_url: str) -> None:
    store.write_bytes(join(store_url, "theirs"), b"1")
    trials = list(probe(store_url))
    assert [trial for trial in trials if trial.fault] == []
    assert {trial.name for trial in trials if trial.is_conditional} == {
        "create only once",
        "replace only what was read",
        "one winner of a race",
    }
    assert list(store.list_files(store_url)) == ["theirs"]


def test_a_store_that_ignores_conditions_is_found_out(
    s3_url: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateway(s3_server, Faults(ignores_conditions=True)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        faults = {trial.name: trial.fault for trial in probe(s3_url) if trial.fault}
    assert "in spite of If-None-Match" in faults.pop("create only once")
    assert "in spite of If-Match" in faults.pop("replace only what was read")
    assert "concurrent writers succeeded" in faults.pop("one winner of a race")
    assert faults == {}


@pytest.mark.parametrize("ahead", [-700.0, 0.0, 1000.0])
def test_a_clock_that_differs_is_reported(
    s3_url: str, s3_server: str, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    with gateway(s3_server, Faults(seconds_ahead=ahead)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert seconds_ahead(s3_url, 5) == pytest.approx(ahead, abs=2)


def test_the_clock_of_this_file_system_is_ours(tmp_path: object) -> None:
    assert seconds_ahead(str(tmp_path), 5) == 0


def test_wrong_credentials_are_reported_with_their_variables(
    s3_url: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateway(s3_server, Faults(knows_key="another")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"InvalidAccessKeyId.*AWS_ACCESS_KEY_ID"):
            list(probe(s3_url))
        assert time.monotonic() - began < 3
        assert not is_open_to_all(s3_url, 5)


def test_a_store_that_asks_for_no_credentials_is_open(s3_url: str, s3_server: str) -> None:
    if os.environ.get("TRAINYARD_TEST_S3_ENDPOINT"):
        pytest.skip("the store of this test is moto, which asks nobody")
    assert is_open_to_all(s3_url, 5)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid:9000"])
def test_an_absent_store_is_reported_within_seconds(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    began = time.monotonic()
    with pytest.raises(InfrastructureError, match=r"does not answer.*AWS_ENDPOINT_URL"):
        check_reachable(s3_url, 4)
    assert time.monotonic() - began < 5
