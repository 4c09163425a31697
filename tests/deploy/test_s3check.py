"""s3check tells a store that a yard can use from one that only looks like it."""

from __future__ import annotations

import uuid

import pytest

from deploy.dev import s3check
from tests.faulty_s3 import Faults, gateway
from trainyard.artifacts import store
from trainyard.artifacts.backends import s3_client

pytestmark = [pytest.mark.slow, pytest.mark.s3]


def status(url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["s3check.py", "--make-bucket", url])
    return s3check.main()


def test_a_bucket_is_created_once_and_passes_the_checks(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = f"made-by-s3check-{uuid.uuid4().hex[:8]}"  # a store of one's own keeps it
    try:
        assert status(f"s3://{bucket}", monkeypatch) == 0
        first = capsys.readouterr().out
        assert f"made bucket {bucket}" in first
        assert first.endswith("fit for a yard\n")
        assert status(f"s3://{bucket}/folder", monkeypatch) == 0
        assert "made bucket" not in capsys.readouterr().out
        assert list(store.list_files(f"s3://{bucket}")) == []
    finally:
        s3_client.call("delete_bucket", Bucket=bucket)


def test_a_store_that_ignores_conditions_is_not_fit(
    s3_url: str,
    s3_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with gateway(s3_server, Faults(ignores_conditions=True)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert status(s3_url, monkeypatch) == 1
    assert "WRONG one winner of a race" in capsys.readouterr().out


def test_no_store_has_the_status_of_infrastructure(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert status(s3_url, monkeypatch) == 3
    assert "AWS_ENDPOINT_URL" in capsys.readouterr().err


def test_a_refused_client_gets_the_names_of_the_variables(
    s3_url: str,
    s3_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with gateway(s3_server, Faults(knows_key="somebody-else")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert status(s3_url, monkeypatch) == 2
    assert "AWS_SECRET_ACCESS_KEY" in capsys.readouterr().err
