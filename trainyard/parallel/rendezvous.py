"""Rendezvous of ranks: the launcher's environment, the store, and the failures.

Ranks that meet at a loopback address listen on loopback only, torch's store as well as gloo and
NCCL. Nothing of these asks for a password, so the network of other ranks must be a trusted one.

Each failure has its own message: no address, a port in use, an unreachable first rank, ranks
started with different options."""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed

from trainyard.errors import CommunicationError, ConfigError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.gloo import one_worker_per_group
from trainyard.parallel.launcher import address_of_environment, rank_of_environment

dist: Any = torch.distributed  # its stubs hide the stores

OPTIONS, AGREED, DISAGREED = (f"trainyard/{name}" for name in ("options", "agreed", "disagreed"))
"""Keys of the store under which ranks compare options."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface on which gloo and NCCL listen."""


def backend_of(config: ParallelConfig, device: torch.device) -> str:
    """The library that ranks talk through. Raises ConfigError where it cannot serve the device."""
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            "--distributed-backend nccl needs CUDA devices and this rank computes on the CPU; use "
            "gloo, or leave the option out"
        )
    return backend


def join_ranks(
    config: ParallelConfig, device: torch.device, degrees: str, timeout: timedelta
) -> None:
    """Create torch's default group once all ranks have joined and their options agree."""
    rank, world_size, _, _ = rank_of_environment()
    backend = backend_of(config, device)
    try:
        store = open_store(rank, world_size, timeout)
        options = f"--distributed-backend {backend}, degrees {degrees}"
        _agree(store, rank, world_size, options, timeout)
        one_worker_per_group()
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise join_failure(error, rank, world_size, f"over {backend} ") from error


def open_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """The store at MASTER_ADDR, which rank 0 serves; torchrun's agent does so itself.

    Keys have the prefix of `store_prefix`. Raises what `join_failure` explains: RuntimeError or
    ValueError of torch."""
    address, port = address_of_environment()
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent_serves
    listener: dict[str, int] = {}
    if _is_loopback(address):
        for name in INTERFACES:
            os.environ.setdefault(name, _loopback_interface())
        if serves and (listening := _loopback_socket(address, port)) is not None:
            listener = {"master_listen_fd": listening.detach()}
    # multi_tenant: the server of an earlier store of this process may still be there.
    store = dist.TCPStore(address, port, world_size, serves, timeout, multi_tenant=True, **listener)
    return dist.PrefixStore(store_prefix(), store)


def store_prefix() -> str:
    """Prefix of all keys: the id that torchrun was given, and its attempt.

    Our scripts give it a random one, so that who knows a job's number does not know its keys."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"trainyard/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _is_loopback(address: str) -> bool:
    """Only by its number or as `localhost`: /etc/hosts may give a node's own name a number of
    loopback, where other nodes do not reach it."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _loopback_socket(address: str, port: int) -> socket.socket | None:
    """A socket for the store's server, which otherwise listens on every interface; None if the
    port is in use, perhaps by this process."""
    number = "127.0.0.1" if address == "localhost" else address
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((number, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise RuntimeError(str(error)) from error
    return listening


def _agree(store: Any, rank: int, world_size: int, options: str, timeout: timedelta) -> None:
    """Compare options with the first rank: ranks that differ would deadlock."""
    if rank == 0:
        store.set(OPTIONS, options)
        _wait_for_all(store, world_size, timeout.total_seconds())
        return
    expected = store.get(OPTIONS).decode()
    if expected == options:
        store.add(AGREED, 1)
        return
    message = (
        f"rank {rank} was started with {options}, and rank 0 with {expected}; start all ranks "
        "with the same options"
    )
    store.set(DISAGREED, message)
    raise ConfigError(message)


def _wait_for_all(store: Any, world_size: int, timeout_seconds: float) -> None:
    """Wait until every other rank has agreed, or one has not."""
    deadline = time.monotonic() + timeout_seconds
    while (agreed := store.add(AGREED, 0)) < world_size - 1:
        if store.check([DISAGREED]):
            raise ConfigError(store.get(DISAGREED).decode())
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"only {agreed + 1} of {world_size} ranks joined within {timeout_seconds:.0f} s "
                "(--distributed-timeout-minutes): see the logs of the others, or start them"
            )
        time.sleep(0.02)


def join_failure(error: Exception, rank: int, world_size: int, how: str = "") -> CommunicationError:
    """The error of ranks that did not find each other at MASTER_ADDR:MASTER_PORT."""
    return CommunicationError(_explanation(error, rank, world_size, how))


def _explanation(error: Exception, rank: int, world_size: int, how: str) -> str:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"MASTER_PORT {port} is in use on this machine, so rank 0 cannot open it: another run, "
            "or one that has just ended? Choose another port"
        )
    if "gai error" in text or "Name or service not known" in text:
        return f"rank {rank}: no machine is known as {address} (MASTER_ADDR): {_first_line(text)}"
    if "clients joined" in text:
        return (
            f"not all of {world_size} ranks came to {address}:{port} in time: start the others, or "
            f"raise --distributed-timeout-minutes {_first_line(text)}"
        )
    if "timed out" in text.lower() or "ECONNREFUSED" in text or "Connection refused" in text:
        return (
            f"rank {rank} of {world_size} did not find the others at {address}:{port}: is rank 0 "
            "running there, is the port open between the machines, and were all "
            f"{world_size} ranks started? (--distributed-timeout-minutes says how long to wait) "
            f"{_first_line(text)}"
        )
    return f"rank {rank} of {world_size} could not join the others {how}at {address}:{port}: {text}"


def _first_line(text: str) -> str:
    return f"[{text.splitlines()[0]}]" if text else ""
