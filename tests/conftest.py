"""What all tests share: real stores, the shared data, a private cache."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vectors import GOLDEN
from trainyard.testing.pool import RankPool

ROOT = Path(__file__).resolve().parents[1]

# Two workers on two cores: one thread each, or they spend their time on each other.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden vectors and real corpora; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TRAINYARD_SHARED", ROOT.parent / "shared"))
    if not (folder / "golden").is_dir():
        pytest.skip("no shared data here (set TRAINYARD_SHARED)")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of vectors made by Megatron-LM."""
    return GOLDEN


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that stay and run what tests hand them, as ranks over gloo."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def private_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests remembered by one test are not seen by another, nor by the user."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Endpoint of a moto server, or of the store named by TRAINYARD_TEST_S3_ENDPOINT."""
    given = os.environ.get("TRAINYARD_TEST_S3_ENDPOINT")
    if given:
        yield given
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the S3 test server did not come up")


@pytest.fixture
def s3_url(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh s3:// folder, with endpoint and credentials in the environment."""
    import fsspec
    from botocore.session import Session

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", os.environ.get("TRAINYARD_TEST_S3_KEY", "testaccess"))
    secret = os.environ.get("TRAINYARD_TEST_S3_SECRET", "testsecret12345")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3").clear_instance_cache()
    client = Session().create_client("s3", endpoint_url=s3_server)
    buckets = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    if "yard-tests" not in buckets:
        client.create_bucket(Bucket="yard-tests")
    return f"s3://yard-tests/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder on a file system, then in an object store: both obey the same laws."""
    if request.param == "file":
        return str(tmp_path / "store")
    return str(request.getfixturevalue("s3_url"))
