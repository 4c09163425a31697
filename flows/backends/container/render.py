"""A job as a container: a request for the engine's API, and the same as a script for people.

Pure: a LaunchSpec, options and facts of the machine in; text and plain data out. The request and
the script have only the names of inherited variables. Their values, which may be secret, are added
when the request is sent."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.backends.container.options import ContainerOptions, size_bytes
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError

SCRIPT = "container.sh"
KEY_LABEL = "trainyard.key"
JOB_LABEL = "trainyard.job"
RUN_VARIABLE = "TRAINYARD_RUN_DIR"

LOCAL = re.compile(r"//([^/@]*@)?(localhost|127(\.\d+){3}|\[::1\])(:|/|$)")
"""A URL of the machine itself, which a container in a network of its own cannot reach."""

HOST_NAME = "host.docker.internal"

HOME = "/tmp"
USER_NAME = "trainyard"
"""For libraries that ask for a user name: the user has only a number in the image."""

LOG_SIZE = "100g"
"""Large enough that no log is rotated: a flow could not resume reading it."""

NO_LIMIT = -1
GPU_STACK_BYTES = 64 << 20
"""What NVIDIA's images require, besides unlimited locked memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts of the machine that a request depends on."""

    user: str
    """`uid:gid` of the flow."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """A container to create."""

    name: str
    """Unique in an engine; the flow finds the container by it again."""
    body: dict[str, Any]
    """For `POST /containers/create` of the Engine API, 1.41 or later, without inherited values."""
    inherited: tuple[str, ...]
    """Variables whose values are added when the request is sent."""


def container_name(spec: LaunchSpec) -> str:
    """The name by which the submission is found again."""
    return name_of(spec.name, spec.key)


def name_of(job: str, key: str) -> str:
    """The container name, from the values of its two labels."""
    return f"trainyard-{job}-{key}"


def render_container(spec: LaunchSpec, options: ContainerOptions, host: Host) -> ContainerRequest:
    """The request; ConfigError for a job that cannot run in one container."""
    _check(spec, options)
    program, *arguments = _command(spec)
    body = {
        "Image": spec.image,
        "Entrypoint": [program],  # overrides the image's own, which may be a stage
        "Cmd": arguments,
        "Env": [f"{name}={value}" for name, value in _environment(spec).items()],
        "User": options.user or host.user,
        "Labels": {KEY_LABEL: spec.key, JOB_LABEL: spec.name},
        "StopSignal": "SIGTERM",
        "StopTimeout": round(spec.grace_seconds),
        "HostConfig": _host_config(spec, options, host),
    }
    if spec.working_directory is not None:
        body["WorkingDir"] = spec.working_directory
    return ContainerRequest(
        name=container_name(spec), body=body, inherited=_inherited(spec, options, host)
    )


def _check(spec: LaunchSpec, options: ContainerOptions) -> None:
    if spec.image is None:
        raise ConfigError(f"job {spec.name}: a container needs an image; name it in the yard")
    if not spec.key:
        raise ConfigError(f"job {spec.name}: a container needs a key by which it is found again")
    wanted = spec.resources
    if wanted.nodes > 1:
        raise ConfigError(
            f"job {spec.name}: nodes ({wanted.nodes}): a container runs on one machine; use a yard "
            f"of Slurm or Kubernetes, or processes_per_node"
        )
    if spec.shares is not None:
        raise ConfigError(
            f"job {spec.name}: a container makes its whole output; shares are for Slurm and "
            f"Kubernetes"
        )
    if options.gpus and len(options.gpus) != wanted.gpus_per_node:
        raise ConfigError(
            f"job {spec.name}: gpus_per_node ({wanted.gpus_per_node}) must be the number of GPUs "
            f"that the container option gpus names ({len(options.gpus)})"
        )


def _command(spec: LaunchSpec) -> tuple[str, ...]:
    if not spec.has_ranks:
        return spec.command
    number = f"--nproc-per-node={spec.resources.processes_per_node}"
    ranks = ("--standalone", "--nnodes=1", number, "--max-restarts=0", "--no-python")
    return (*spec.rank_launcher, *ranks, *spec.command)


def _environment(spec: LaunchSpec) -> dict[str, str]:
    return {
        "HOME": HOME,
        "USER": USER_NAME,
        "PYTHONUNBUFFERED": "1",
        **spec.environment,
        RUN_VARIABLE: spec.run_directory,
    }


def _inherited(spec: LaunchSpec, options: ContainerOptions, host: Host) -> tuple[str, ...]:
    return tuple(
        name
        for name in options.inherited_environment
        if name in host.environment and name not in spec.environment
    )


def _network(spec: LaunchSpec, options: ContainerOptions, host: Host) -> str:
    if options.network is not None:
        return options.network
    inherited = {name: host.environment[name] for name in _inherited(spec, options, host)}
    for name, value in (inherited | dict(spec.environment)).items():
        if LOCAL.search(value):
            raise ConfigError(
                f"job {spec.name}: {name} points to localhost, which in a container is the "
                f'container itself; set the container option network to "host", which opens all '
                f"ports of the machine to it, or point to {HOST_NAME}"
            )
    return "bridge"


def _host_config(spec: LaunchSpec, options: ContainerOptions, host: Host) -> dict[str, Any]:
    network = _network(spec, options, host)
    # exec: torch compiles into /tmp and loads from there.
    temporary_bytes = size_bytes(options.temporary_size)
    config: dict[str, Any] = {
        "NetworkMode": network,
        "Init": options.init,
        "ReadonlyRootfs": options.read_only,
        "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={temporary_bytes}"},
        "ShmSize": size_bytes(options.shared_memory),
        "Mounts": [
            {"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only}
            for m in spec.mounts_with_run_folder
        ],
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_SIZE}},
    }
    if network != "host" and not network.startswith("container:"):
        config["ExtraHosts"] = [f"{HOST_NAME}:host-gateway"]
    if options.capabilities:
        config["CapAdd"] = [f"CAP_{name.removeprefix('CAP_')}" for name in options.capabilities]
    if options.devices:
        config["Devices"] = [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rwm"}
            for path in options.devices
        ]
    return {**config, **_sizes(spec), **_gpus(spec, options)}


def _sizes(spec: LaunchSpec) -> dict[str, Any]:
    wanted, sizes = spec.resources, {}
    if wanted.memory_bytes_per_node is not None:
        # Equal to memory: no swap, or a job would slow down silently before it fails.
        sizes = dict.fromkeys(("Memory", "MemorySwap"), wanted.memory_bytes_per_node)
    if wanted.cpus_per_node is not None:
        sizes["NanoCpus"] = wanted.cpus_per_node * 10**9
    return sizes


def _gpus(spec: LaunchSpec, options: ContainerOptions) -> dict[str, Any]:
    if not spec.resources.gpus_per_node:
        return {}
    which: dict[str, Any] = {"Count": spec.resources.gpus_per_node}
    if options.gpus:
        which = {"DeviceIDs": list(options.gpus)}
    limits = {"memlock": NO_LIMIT, "stack": GPU_STACK_BYTES}
    return {
        "DeviceRequests": [{**which, "Capabilities": [["gpu"]]}],
        "Ulimits": [{"Name": name, "Soft": at, "Hard": at} for name, at in limits.items()],
    }


# --- for people -----------------------------------------------------------------------------------


def docker_run(request: ContainerRequest) -> str:
    """A script that runs the same container by hand, without a name that a flow would find."""
    body = request.body
    words = [shlex.quote(word) for word in (body["Image"], *body["Cmd"])]
    lines = ["exec docker run --rm", *_flags(request), " ".join(words)]
    names = " ".join(request.inherited)
    needs = [f"# Set these variables first: {names}"] if names else []
    return "\n".join(["#!/bin/sh", *needs, " \\\n  ".join(lines), ""])


def _flags(request: ContainerRequest) -> Iterator[str]:
    body, config = request.body, request.body["HostConfig"]
    yield _flag("entrypoint", body["Entrypoint"][0])
    yield _flag("user", body["User"])
    if "WorkingDir" in body:
        yield _flag("workdir", body["WorkingDir"])
    yield _flag("network", config["NetworkMode"])
    for entry in config.get("ExtraHosts", ()):
        yield _flag("add-host", entry)
    yield from (_flag("env", one) for one in (*request.inherited, *body["Env"]))
    for mount in config["Mounts"]:
        mode = ",readonly" if mount["ReadOnly"] else ""
        yield _flag("mount", f"type=bind,source={mount['Source']},target={mount['Target']}{mode}")
    yield _flag("tmpfs", f"/tmp:{config['Tmpfs']['/tmp']}")
    yield from _limits(config)
    yield _flag("stop-timeout", str(body["StopTimeout"]))


def _limits(config: Mapping[str, Any]) -> Iterator[str]:
    yield f"--shm-size={config['ShmSize']}"
    for flag, key in (("memory", "Memory"), ("memory-swap", "MemorySwap")):
        if key in config:
            yield f"--{flag}={config[key]}"
    if "NanoCpus" in config:
        yield f"--cpus={config['NanoCpus'] // 10**9}"
    for request in config.get("DeviceRequests", ()):
        named = ",".join(request.get("DeviceIDs", ()))
        yield f"--gpus '\"device={named}\"'" if named else f"--gpus={request['Count']}"
    for limit in config.get("Ulimits", ()):
        yield f"--ulimit={limit['Name']}={limit['Soft']}"
    yield from (f"--device={device['PathOnHost']}" for device in config.get("Devices", ()))
    yield from (f"--cap-drop={name}" for name in config["CapDrop"])
    yield from (f"--cap-add={name}" for name in config.get("CapAdd", ()))
    yield from (f"--security-opt={name}" for name in config["SecurityOpt"])
    if config["ReadonlyRootfs"]:
        yield "--read-only"
    if config["Init"]:
        yield "--init"


def _flag(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(value)}"
