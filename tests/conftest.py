"""What all tests share: real stores, the shared data, a private cache."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs
from hypothesis import settings

from tests import left_out, records, rotation, scheduling
from tests.dev_store import dev_store
from tests.vectors import GOLDEN
from trainyard.testing.pool import RankPool

ROOT = Path(__file__).resolve().parents[1]

# Two workers on two cores: one thread each, or they spend their time on each other.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes says more of the machine than of the code. Every run draws other
# examples, so few at a time are many.
settings.register_profile("yard", deadline=None, max_examples=25)
settings.load_profile("yard")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """`--third` must be known before the command line is read."""
    pluginmanager.register(rotation)
    pluginmanager.register(left_out)
    pluginmanager.register(scheduling)
    pluginmanager.register(records)


# --- what running so many tests costs ----------------------------------------------------------

# Each worker collects all tests; none of what is made there is garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """No collection of garbage walks over the tests and modules that stay until the end, and few
    walk over what tests make: at Python's own threshold, 700 objects, they cost a thirtieth."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


_attach_to_all = catching_logs.__enter__


def _attach_to_root(self: catching_logs[Any]) -> Any:
    """pytest looks through all loggers, two thousand, six times a test, for those that keep their
    records to themselves: a millisecond. No test reads what such a logger has."""
    if self.level is not None:  # --log-level
        return _attach_to_all(self)
    root = logging.getLogger()
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


catching_logs.__enter__ = _attach_to_root  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist sends six messages a test; two are enough, unless -v asks for more."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor" and config.get_verbosity() <= 0:
            plugin.sendevent = partial(_send_what_matters, plugin.sendevent)


def _send_what_matters(send: Callable[..., None], name: str, **content: Any) -> None:
    """Neither when a test began and ended, nor a setup or teardown that passed at once."""
    if name in ("logstart", "logfinish"):
        return
    if name == "testreport":
        report = content["data"]
        if (
            report["when"] != "call"
            and report["outcome"] == "passed"
            and report["duration"] < 0.005
            and not report["sections"]
            and not report["user_properties"]
        ):
            return
    send(name, **content)


@pytest.hookimpl(tryfirst=True)  # before -m looks for the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that ask a server of S3 are slow: it would take a tenth of the time of unit tests."""
    for item in items:
        if "s3_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


# --- what tests share --------------------------------------------------------------------------


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


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders, each of its own name, that are made by who writes there."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def private_cache(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests remembered by one test are not seen by another, nor by the user."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(next(caches)))


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """What a test writes need not outlive a loss of power, and a busy disk takes long to say that
    it would; processes that tests start do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def levels_of_loggers() -> None:
    """A stage that ran in this process set them; what a test reads of the log is of that test."""
    for name in ("trainyard", "stages", "flows"):
        logger = logging.getLogger(name)
        if logger.level != logging.NOTSET:  # setting it makes every logger forget what it knows
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Endpoint of a moto server, or of the store named by TRAINYARD_TEST_S3_ENDPOINT."""
    given = os.environ.get("TRAINYARD_TEST_S3_ENDPOINT")
    if given:
        yield given
        return
    with dev_store() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_settings(s3_server: str) -> dict[str, str]:
    """Endpoint and credentials of a store that has the bucket yard-tests, as variables."""
    from botocore.session import Session

    key = os.environ.get("TRAINYARD_TEST_S3_KEY", "testaccess")
    secret = os.environ.get("TRAINYARD_TEST_S3_SECRET", "testsecret12345")
    region = "us-east-1"
    client = Session().create_client(
        "s3",
        endpoint_url=s3_server,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=region,
    )
    if "yard-tests" not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket="yard-tests")
    return {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": region,
    }


@pytest.fixture
def s3_url(s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh s3:// folder, with endpoint and credentials in the environment."""
    for name, value in s3_settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://yard-tests/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder on a file system, then in an object store: both obey the same laws."""
    if request.param == "file":
        return str(tmp_path / "store")
    return str(request.getfixturevalue("s3_url"))
