"""Requests to an engine and the scripts beside them: letter by letter, and what cannot be."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.backends.container.options import ContainerOptions, size_bytes
from flows.backends.container.render import Host, docker_run, render_container
from flows.backends.spec import LaunchSpec, Mount, Resources, Shares
from tests.flows.backends.goldens import check_golden
from trainyard.errors import ConfigError

RUN = "/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1"
HOST = Host(user="1000:1000")
SECRET = "wJalrXUtnFEMI"
WITH_STORE = Host(
    user="1000:1000",
    environment={
        "AWS_ACCESS_KEY_ID": "yard",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": "http://127.0.0.1:8333",
        "PATH": "/usr/bin",
    },
)


def spec(**values: Any) -> LaunchSpec:
    command = ("python", "-m", "stages.merge", "--config", f"{RUN}/config.toml")
    given = {"name": "merge", "command": command, "run_directory": RUN, "key": "7c1f-1"}
    return LaunchSpec(**{**given, "image": "trainyard/merge:0.9", **values})


TRAINING = spec(
    name="pretrain",
    key="7c1f0d9a2b3e4f56-1",
    image="registry.example.org/yard/cuda:0.9",
    environment={"NCCL_DEBUG": "WARN", "TOLD": "two words, $HOME and 'quotes'"},
    mounts=(
        Mount(source="/data/pile", target="/pile"),
        Mount(source="/yard", target="/yard", read_only=False),
    ),
    working_directory="/opt/yard",
    resources=Resources(
        processes_per_node=8,
        gpus_per_node=8,
        cpus_per_node=96,
        memory_bytes_per_node=2**40,
    ),
)
MACHINE = ContainerOptions(
    network="host",
    gpus=tuple(map(str, range(8))),
    capabilities=("IPC_LOCK",),
    devices=("/dev/infiniband",),
)


@pytest.mark.parametrize(
    ("name", "job", "options", "host"),
    [
        ("container-one-process", spec(), ContainerOptions(), HOST),
        ("container-on-gpus", TRAINING, MACHINE, WITH_STORE),
    ],
)
def test_golden_requests(name: str, job: LaunchSpec, options: ContainerOptions, host: Host) -> None:
    request = render_container(job, options, host)
    document = {"name": request.name, "inherited": request.inherited, "body": request.body}
    check_golden(f"{name}.json", json.dumps(document, indent=2) + "\n")
    check_golden(f"{name}.sh", docker_run(request))
    subprocess.run(["sh", "-n"], input=docker_run(request), text=True, check=True)
    assert SECRET not in json.dumps(document) + docker_run(request)


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@settings(max_examples=20)
@given(st.lists(words, min_size=1, max_size=4), st.dictionaries(st.just("TEXT"), words))
def test_script_matches_the_request(arguments: list[str], environment: dict[str, str]) -> None:
    job = spec(command=("python", *arguments), environment=environment)
    request = render_container(job, ContainerOptions(), HOST)
    read = shlex.split(docker_run(request).partition("\n")[2].replace("\\\n", " "))
    assert read[:3] == ["exec", "docker", "run"]
    assert read[-len(arguments) :] == request.body["Cmd"]
    given = [word.removeprefix("--env=") for word in read if word.startswith("--env=")]
    assert given == request.body["Env"]


@pytest.mark.parametrize(
    ("environment", "is_local"),
    [
        ({}, False),
        ({"AWS_ENDPOINT_URL": "https://s3.example.org"}, False),
        ({"AWS_ENDPOINT_URL": "http://localhost:9000"}, True),
        ({"AWS_ENDPOINT_URL_S3": "http://[::1]:9000/"}, True),
        ({"OTHER": "http://localhost:9000"}, False),
        ({"AWS_ENDPOINT_URL": "http://localhost.example.org"}, False),
    ],
)
def test_a_container_joins_the_hosts_network_only_when_its_options_say_so(
    environment: dict[str, str], is_local: bool
) -> None:
    host = Host(user="1:1", environment=environment)
    for network in ("host", "trainyard", "bridge"):
        chosen = render_container(spec(), ContainerOptions(network=network), host)
        config = chosen.body["HostConfig"]
        assert config["NetworkMode"] == network
        assert ("ExtraHosts" in config) is (network != "host")
    if is_local:
        with pytest.raises(ConfigError, match=r'AWS_ENDPOINT_URL.* points to localhost.*"host"'):
            render_container(spec(), ContainerOptions(), host)
    else:
        config = render_container(spec(), ContainerOptions(), host).body["HostConfig"]
        assert config["NetworkMode"] == "bridge"


def test_a_variable_of_the_job_may_not_point_to_localhost_either() -> None:
    job = spec(environment={"SERVER": "http://user:word@127.0.0.1:80/"})
    with pytest.raises(ConfigError, match="SERVER points to localhost") as refused:
        render_container(job, ContainerOptions(), HOST)
    assert "word" not in str(refused.value)


def test_variables_of_the_job_are_not_inherited() -> None:
    host = Host(user="1:1", environment={"AWS_REGION": "here"})
    job = spec(environment={"AWS_REGION": "there"})
    request = render_container(job, ContainerOptions(), host)
    assert request.inherited == ()
    assert "AWS_REGION=there" in request.body["Env"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": None}, "needs an image"),
        ({"key": ""}, "needs a key"),
        ({"resources": Resources(nodes=2)}, r"nodes \(2\).*one machine"),
        ({"shares": Shares(count=2)}, "whole output"),
        ({"run_directory": "runs/1"}, "absolute path"),
    ],
)
def test_jobs_that_one_container_cannot_run_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        render_container(spec(**values), ContainerOptions(), HOST)


def test_as_many_gpus_are_named_as_the_job_asks_for() -> None:
    wanted = spec(resources=Resources(gpus_per_node=2))
    with pytest.raises(ConfigError, match=r"gpus_per_node \(2\).*names \(1\)"):
        render_container(wanted, ContainerOptions(gpus=("0",)), HOST)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "/var/run/docker.sock"),
        ("pull", "always"),
        ("network", "my net"),
        ("shared_memory", "16GiB"),
        ("temporary_size", "0"),
        ("user", "me;id"),
        ("gpus", ("0,1",)),
        ("capabilities", ("ipc lock",)),
        ("devices", ("infiniband",)),
        ("inherited_environment", ("A=B",)),
        ("inherited_environment", ("AWS_REGION", "PREFECT_API_AUTH_STRING")),
    ],
)
def test_options_that_no_engine_takes_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"container option {name}"):
        ContainerOptions(**{name: value})


def test_sizes() -> None:
    texts = ("12", "12b", "3k", "512m", "16g")
    assert [size_bytes(text) for text in texts] == [12, 12, 3 << 10, 512 << 20, 16 << 30]
