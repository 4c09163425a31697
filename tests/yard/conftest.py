"""What the tests of whole flows share: a Prefect server, a Slurm, a cache that outlives a test."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.backends.kubernetes import watch
from flows.cli.run_flow import ENVIRONMENT
from flows.server.ephemeral import EphemeralServer
from tests.yard.container.containers import containers, docker, running_engine
from tests.yard.faults.faults import PASSWORD, Server
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.fake_kube_pods import why_no_pods
from tests.yard.operator.deployed import WholeServer
from tests.yard.server_logs import of_servers
from tests.yard.slurm.cluster import Cluster, why_not
from tests.yard.yard import Yard


@pytest.fixture(scope="session", autouse=True)
def as_from_a_terminal() -> None:
    """What a shell starts in the background, or nohup, pays no heed to SIGINT, and neither would
    the programs that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_server_fails_in_silence(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """At the end of all tests no log of a server that they started holds a traceback, those that
    flows start for themselves included."""
    yield
    assert list(of_servers(tmp_path_factory.getbasetemp())) == []


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A running Prefect server: the environment that leads to it."""
    api = EphemeralServer(tmp_path_factory.mktemp("prefect"), password=PASSWORD)
    try:
        api.wait()
        yield {**ENVIRONMENT, **api.environment}
    finally:
        api.stop()


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of digests that lasts from one test of a module to the next."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running Slurm of two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """A running Docker engine, by the name of an image on it that has a Python."""
    with running_engine() as name:
        yield name


@pytest.fixture
def key(request: pytest.FixtureRequest) -> Iterator[str]:
    """A key of this test alone; no container of it is left on the engine."""
    name = f"test-{os.getpid()}-{zlib.crc32(request.node.nodeid.encode())}"
    yield name
    if left := containers(name):
        docker("rm", "--force", *left)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKube]:
    """A running stand-in for a cluster of Kubernetes."""
    if reason := why_no_pods():
        pytest.skip(reason)
    fake = FakeKube(tmp_path_factory.mktemp("kube"))
    try:
        fake.up()
        yield fake
    finally:
        fake.down()


@pytest.fixture
def fake(stand_in: FakeKube, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    """The stand-in, as it was when it was new."""
    monkeypatch.setattr(watch, "EVENTS_SECONDS", 0.2)
    stand_in.renew()
    stand_in.asked.clear()
    yield stand_in
    stand_in.renew()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """A Prefect server with all of its services; files with another kind have their own."""
    server = WholeServer(tmp_path_factory.mktemp("server"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A Prefect server of one test alone, which that may kill and start again."""
    server = Server(tmp_path / "home")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def yard(tmp_path: Path, mortal: Server) -> Yard:
    """A yard of one test alone, with that server; files with another kind have their own."""
    given = {"TRAINYARD_CACHE": str(tmp_path / "cache"), "PREFECT_HOME": str(tmp_path / "client")}
    return Yard(tmp_path, {**mortal.environment, **given})
