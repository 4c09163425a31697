"""Requests to the API server of a Kubernetes cluster: credentials, patience, streams.

The official client brings the credentials (kubeconfig with its plugins, or those of a pod) and TLS.
A server that is away is waited for; what it refuses is told at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from flows.backends.errors import BackendUnavailableError
from flows.backends.kubernetes.pod import Document
from trainyard.errors import ConfigError

PATIENCE_SECONDS = 120.0
ANSWER_SECONDS = 30.0

AWAY = frozenset({408, 429, 500, 502, 503, 504})
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class AwayError(Exception):
    """Nobody answered, or somebody who could not; worth another try."""


class GoneError(Exception):
    """410: the server keeps no changes from so long ago; list again."""


class RefusedError(Exception):
    """The server's answer to what was asked."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(message or reason)
        self.status, self.reason = status, reason


class KubernetesApi:
    """One cluster; belongs to the event loop in which it was opened."""

    def __init__(
        self,
        kubeconfig: str | None = None,
        context: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._patience = patience_seconds
        self._api: Any = None

    # --- access -------------------------------------------------------------------------------

    async def open(self) -> KubernetesApi:
        """Read the credentials; ConfigError where there are none."""
        from kubernetes.aio import client as api  # 0.8 s, which flows elsewhere need not wait for

        settings = api.Configuration()
        settings.connection_pool_maxsize = 0  # a log of every pod is a connection
        await self._load(settings)
        self._api = api.ApiClient(settings)
        return self

    async def close(self) -> None:
        """Close all connections; what is still read from them ends."""
        if self._api is not None:
            await self._api.close()

    async def _load(self, settings: Any) -> None:
        from kubernetes.aio import config as access

        file = self._kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        # Several may be joined by colons, as kubectl has it.
        paths = [os.path.expanduser(one) for one in file.split(os.pathsep) if one]
        is_asked_for = bool(self._kubeconfig or os.environ.get("KUBECONFIG"))
        try:
            if any(os.path.exists(path) for path in paths):
                joined = os.pathsep.join(paths)
                await access.load_kube_config(joined, self._context, settings, False)
            elif ACCOUNT.exists() and not is_asked_for:
                access.load_incluster_config(settings)
            else:
                raise ConfigError(
                    f"no way to a Kubernetes cluster: there is no kubeconfig at {file}, and this "
                    f"is no pod with a service account; set KUBECONFIG or the option kubeconfig"
                )
        except (access.ConfigException, OSError, ValueError, KeyError) as error:
            raise ConfigError(f"kubeconfig {file} cannot be used: {error}") from error

    # --- requests -----------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
    ) -> Document:
        """Ask until the server answers; RefusedError with what it says."""
        is_new = False
        for wait in (*waits(self._patience), None):
            try:
                return await self._once(method, path, query, body)
            except AwayError as error:
                if wait is None:
                    raise BackendUnavailableError(
                        f"the API server of Kubernetes is away since {self._patience:.0f} s "
                        f"({method} {path}): {error}"
                    ) from error
                await asyncio.sleep(wait)
            except RefusedError as error:
                if error.status != 401 or is_new:
                    raise
                is_new = True  # a token of a plugin lasts minutes
                await self._renew()
        raise AssertionError("the last wait raises")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Document | None
    ) -> Document:
        try:
            response = await self._call(method, path, query or {}, body, ANSWER_SECONDS)
            async with response:
                answer = _document(await response.read())
        except aiohttp.ClientSSLError as error:
            raise _untrusted(error) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AwayError(str(error) or type(error).__name__) from error
        if response.status >= 300:
            raise error_of(response.status, answer)
        return answer

    async def _renew(self) -> None:
        old = self._api
        await self.open()
        if old is not None:
            await old.close()  # what is read from it breaks, and is taken up with the new one

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Document | None = None,
        timeout: float | tuple[float, float] | None = None,
    ) -> Any:
        assert self._api is not None, "open() first"
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return await self._api.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout,
        )

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], silent_seconds: float
    ) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        """Ask for what comes line by line; AwayError when nothing comes for so long, too."""
        try:
            response = await self._call(
                "GET", path, query, timeout=(ANSWER_SECONDS, silent_seconds)
            )
            async with response:
                if response.status != 200:
                    raise error_of(response.status, _document(await response.read()))
                yield _lines(response)
        except aiohttp.ClientSSLError as error:
            raise _untrusted(error) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AwayError(str(error) or type(error).__name__) from error


def waits(patience_seconds: float, most: float = 15.0) -> list[float]:
    """Seconds between tries: doubling, with a little chance in each, all together the patience."""
    found: list[float] = []
    wait = 0.5
    while sum(found) < patience_seconds:
        found.append(min(wait, most) * random.uniform(0.8, 1.2))
        wait *= 2
    return found


def _untrusted(error: Exception) -> ConfigError:
    return ConfigError(
        f"the API server of Kubernetes is not who the kubeconfig says: {error}; correct its server "
        f"or its certificate-authority-data"
    )


def error_of(status: int, answer: Document) -> Exception:
    """The error that an answer means."""
    message, reason = str(answer.get("message") or ""), str(answer.get("reason") or "")
    if status == 410:
        return GoneError(message)
    if status in AWAY:
        return AwayError(f"{status} {message or reason}".strip())
    return RefusedError(status, message, reason)


def _document(data: bytes) -> Document:
    try:
        found = json.loads(data)
    except ValueError:  # a proxy in between speaks HTML
        return {"message": data[:200].decode(errors="replace")}
    return found if isinstance(found, dict) else {}


async def _lines(response: Any) -> AsyncGenerator[list[bytes]]:
    """Lines of any length, without their ends; the last one too where it has none."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if whole := [line for line in lines if line]:
            yield whole
    if rest:
        yield [rest]
