"""Requests to the API server of a Kubernetes cluster; objects are JSON documents.

The official client brings credentials (of a kubeconfig with its plugins, or of a pod) and TLS. A
request is repeated while the server is unavailable; a refusal raises at once. All objects are in
one namespace and have the key of a submission as a label."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from flows.backends import contact
from flows.backends.backoff import pauses
from flows.backends.errors import BackendUnavailableError, NoRoomError
from flows.backends.kubernetes.manifests import JOBSET, KEY_LABEL, Document
from flows.backends.outcome import brief
from trainyard import json_text
from trainyard.errors import ConfigError, InfrastructureError

PATIENCE_SECONDS = 120.0
"""How long a request is repeated while the server is unavailable."""
ANSWER_SECONDS = 30.0
WATCH_SECONDS = 240
"""The server ends a watch after this; the next one continues where it was."""
LATE_SECONDS = 30.0
"""A watch that does not end this long after that has lost its connection."""
SILENT_SECONDS = 300.0
"""A log without a line for this long is requested again: its connection may be lost."""

UNAVAILABLE = frozenset({408, 429, 500, 502, 503, 504})
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

OF_RIGHTS = re.compile(r'User "[^"]*" cannot ')
"""A refusal by RBAC. Quotas, webhooks and policies also refuse with 403, with other messages."""

PATHS = {
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "JobSet": f"/apis/{JOBSET}/namespaces/{{namespace}}/jobsets",
    "JobSet API": f"/apis/{JOBSET}",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Event": "/api/v1/namespaces/{namespace}/events",
}
METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}


class UnavailableError(Exception):
    """No answer, or one after which a retry may succeed."""


class GoneError(Exception):
    """410: the server no longer has changes from so long ago; list again."""


class RefusedError(Exception):
    """The server refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: Document


class KubernetesClient:
    """One namespace of a cluster; belongs to the event loop in which it was opened."""

    def __init__(
        self,
        namespace: str,
        kubeconfig: str | None = None,
        context: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.namespace = namespace
        self.patience_seconds = patience_seconds
        self._kubeconfig = kubeconfig
        self._context = context
        self.contact = contact.current()
        self._api: Any = None
        self._renewing = asyncio.Lock()

    async def open(self) -> KubernetesClient:
        """Read the credentials; ConfigError if there are none."""
        from kubernetes.aio import client, config  # 0.8 s, which other backends need not wait for

        settings = client.Configuration()
        settings.connection_pool_maxsize = 0  # the log of each pod is a connection
        given = self._kubeconfig or os.environ.get("KUBECONFIG")
        file = given or "~/.kube/config"
        # Several may be joined by colons, as for kubectl.
        paths = [os.path.expanduser(one) for one in file.split(os.pathsep) if one]
        try:
            if any(os.path.exists(path) for path in paths):
                joined = os.pathsep.join(paths)
                await config.load_kube_config(joined, self._context, settings, False)
            elif ACCOUNT.exists() and not given:
                config.load_incluster_config(settings)
            else:
                raise ConfigError(
                    f"no credentials for a Kubernetes cluster: there is no kubeconfig at {file}, "
                    f"and this is no pod with a service account; set KUBECONFIG or the option "
                    f"kubeconfig"
                )
        except (config.ConfigException, OSError, ValueError, KeyError) as error:
            raise ConfigError(f"kubeconfig {file} cannot be used: {error}") from error
        self._api = client.ApiClient(settings)
        return self

    async def close(self) -> None:
        """Close all connections, open streams included."""
        async with self._renewing:
            if self._api is not None:
                await self._api.close()

    # --- objects ------------------------------------------------------------------------------

    async def get(self, kind: str, name: str) -> Document | None:
        """An object; None if there is none."""
        return await self._ask("get", kind, name, allowed=(404,))

    async def find(self, kind: str, key: str) -> tuple[list[Document], str]:
        """The objects with the key of a submission, and the version to watch from."""
        found = await self._ask("list", kind, query={"labelSelector": f"{KEY_LABEL}={key}"}) or {}
        return found.get("items") or [], (found.get("metadata") or {}).get("resourceVersion", "")

    async def events_about(self, name: str) -> list[Document]:
        """The events of an object."""
        query = {"fieldSelector": f"involvedObject.name={name}"}
        return (await self._ask("list", "Event", query=query) or {}).get("items") or []

    async def create(self, document: Document, is_trial: bool = False) -> Document:
        """Create an object, or return the one of its name, if that is ours.

        is_trial: a dry run; the cluster checks the object and stores nothing."""
        kind, name = document["kind"], document["metadata"]["name"]
        query = {"fieldManager": "trainyard", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if is_trial else {}
        made = await self._ask("create", kind, query=query, body=document, allowed=(409,))
        made = made or await self.get(kind, name)
        if made is None:
            raise InfrastructureError(f"{kind} {name} was deleted while it was being created")
        key = document["metadata"]["labels"][KEY_LABEL]
        if (made["metadata"].get("labels") or {}).get(KEY_LABEL) != key:
            raise ConfigError(
                f"{kind} {name} in namespace {self.namespace} exists and is not ours: it does not "
                f"have the label {KEY_LABEL}={key}"
            )
        return made

    async def own(self, kind: str, name: str, owner: Document) -> None:
        """Let the cluster delete an object together with its owner."""
        fields = {key: owner["metadata"][key] for key in ("name", "uid")}
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **fields}
        await self._ask("patch", kind, name, body={"metadata": {"ownerReferences": [reference]}})

    async def delete(self, kind: str, name: str) -> None:
        """Ask the cluster to delete an object, its pods first; a watch shows when it is gone."""
        query = {"propagationPolicy": "Foreground"}
        await self._ask("delete", kind, name, query, allowed=(404,))

    async def serves_jobsets(self) -> bool:
        """Whether the custom resource JobSet is installed."""
        return await self._ask("get", "JobSet API", allowed=(403, 404)) is not None

    # --- streams ------------------------------------------------------------------------------

    async def watch(self, kind: str, key: str, version: str) -> AsyncGenerator[Change]:
        """Changes since a version, until the server ends the watch. GoneError if it no longer has
        that version, UnavailableError if the connection is lost."""
        query = {
            "labelSelector": f"{KEY_LABEL}={key}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with self._stream(self._path(kind), query, WATCH_SECONDS + LATE_SECONDS) as batches:
            async for line in (line async for batch in batches for line in batch):
                self.contact.answer()
                kind_of_change, document = _event(line)
                if kind_of_change == "ERROR":
                    raise _error_of(int(document.get("code") or 0), document)
                yield Change(kind_of_change, document)

    async def log(self, pod: str, container: str, since: str) -> AsyncGenerator[list[bytes]]:
        """Lines of a pod's log, each after its time, in batches as they come, until its container
        has ended. since: whole seconds, or empty for all. UnavailableError if the connection is
        lost."""
        query = {"container": container, "follow": "true", "timestamps": "true"}
        query |= {"sinceTime": since} if since else {}
        path = f"{self._path('Pod', pod)}/log"
        async with self._stream(path, query, SILENT_SECONDS) as batches:
            async for lines in batches:
                yield lines

    @asynccontextmanager
    async def _stream(
        self, path: str, query: Mapping[str, str], silent_seconds: float
    ) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        with _connection_errors():
            response = await self._call("GET", path, query, None, (ANSWER_SECONDS, silent_seconds))
            async with response:
                if response.status != 200:
                    raise _error_of(response.status, _document(await response.read()))
                self.contact.answer()
                yield _lines(response)

    # --- requests -----------------------------------------------------------------------------

    async def _ask(
        self,
        verb: str,
        kind: str,
        name: str = "",
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        allowed: tuple[int, ...] = (),
    ) -> Document | None:
        """Repeat a request until the server answers; None for an allowed status. Raises what
        `error_for` makes of any other refusal."""
        path, failure, is_renewed = self._path(kind, name), None, False
        self.contact.ask()
        for pause in pauses(self.patience_seconds):
            await asyncio.sleep(pause)
            used = self._api
            try:
                answer = await self._request(METHODS[verb], path, query or {}, body)
            except UnavailableError as error:
                failure = error
                self.contact.fail(str(error))
            except RefusedError as error:
                self.contact.answer()
                if error.status in allowed:
                    return None
                if error.status != 401 or is_renewed:
                    raise self.error_for(error, verb, kind) from error
                is_renewed = True
                await self._renew(used)
            else:
                self.contact.answer()
                return answer
        raise BackendUnavailableError(
            f"the API server of Kubernetes has been unavailable for {self.patience_seconds:.0f} s "
            f"({verb} {path}): {failure}"
        ) from failure

    async def _renew(self, refused: Any) -> None:
        """Read the credentials again, unless another request did so since: tokens of a plugin last
        minutes. Requests and streams with the old ones break, and are repeated."""
        async with self._renewing:
            if self._api is refused:
                await self.open()
                await refused.close()

    async def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Document | None
    ) -> Document:
        with _connection_errors():
            async with await self._call(method, path, query, body, ANSWER_SECONDS) as response:
                answer = _document(await response.read())
        if response.status >= 300:
            raise _error_of(response.status, answer)
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Document | None,
        timeout: float | tuple[float, float],
    ) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        used = self._api
        try:
            return await used.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "application/json, */*", "Content-Type": kind},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
        # What aiohttp raises if a session was closed; a request that waits for DNS is cancelled.
        except (AssertionError, RuntimeError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            assert task is not None
            if used is self._api or task.cancelling():
                raise
            raise UnavailableError("the credentials were renewed meanwhile") from error

    def _path(self, kind: str, name: str = "") -> str:
        path = PATHS[kind].format(namespace=self.namespace)
        return f"{path}/{name}" if name else path

    def error_for(self, error: RefusedError, verb: str, kind: str) -> Exception:
        """The error that explains a refusal."""
        what = f"{verb} {kind} in namespace {self.namespace}"
        if "exceeded quota" in str(error):
            return NoRoomError(f"{what}: {error}")
        if error.status == 401:
            return ConfigError(
                f"{what}: the cluster does not know these credentials ({error}); renew the "
                f"kubeconfig or its plugin's login"
            )
        if error.status == 403 and OF_RIGHTS.search(str(error)):
            return ConfigError(
                f"{what} is not allowed: {error}. deploy/kubernetes/rbac.yaml has the role that a "
                f"worker needs"
            )
        if error.status == 404:
            return ConfigError(
                f"{what}: {error}; the namespace or the kind does not exist (kubectl get namespace "
                f"{self.namespace})"
            )
        return ConfigError(f"{what} was refused: {error}. Correct the options of the yard")


@contextmanager
def _connection_errors() -> Iterator[None]:
    """UnavailableError for a lost connection, ConfigError for one that TLS does not trust."""
    try:
        yield
    except aiohttp.ClientSSLError as error:
        raise ConfigError(
            f"the certificate of the Kubernetes API server does not match the kubeconfig: {error}; "
            f"correct its server or its certificate-authority-data"
        ) from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise UnavailableError(str(error) or type(error).__name__) from error


def _error_of(status: int, answer: Document) -> Exception:
    message = str(answer.get("message") or answer.get("reason") or "")
    if status == 410:
        return GoneError(message)
    if status in UNAVAILABLE:
        return UnavailableError(f"{status} {message}".strip())
    return RefusedError(status, message)


def _event(line: bytes) -> tuple[str, Document]:
    """The type and the object of a line of a watch. UnavailableError for a line cut short."""
    event = _document(line)
    if isinstance(event.get("type"), str) and isinstance(event.get("object"), dict):
        return event["type"], event["object"]
    raise UnavailableError(f"a watch sent something that is not a change: {brief(str(line))}")


def _document(data: bytes) -> Document:
    try:
        found = json_text.loads(data)
    except ValueError:  # a proxy may answer in HTML
        return {"message": data[:200].decode(errors="replace")}
    return found if isinstance(found, dict) else {}


async def _lines(response: Any) -> AsyncGenerator[list[bytes]]:
    """Lines of any length without their ends, the last one too if it has none."""
    rest: list[bytes] = []  # joined once: to search a long line again for each chunk is quadratic
    async for chunk in response.content.iter_any():
        first, *more = chunk.split(b"\n")
        rest.append(first)
        if more:
            lines = [b"".join(rest), *more[:-1]]
            rest = [more[-1]]
            if whole := [line for line in lines if line]:
                yield whole
    if last := b"".join(rest):
        yield [last]
