"""What a job block asks a Kubernetes cluster, and orders: objects as the documents they are.

Everything is in one namespace and bears the key of a submission."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from flows.backends.backoff import NoRoomError
from flows.backends.kubernetes.api import (
    PATIENCE_SECONDS,
    KubernetesApi,
    RefusedError,
    error_of,
)
from flows.backends.kubernetes.manifests import JOBSET, KEY_LABEL
from flows.backends.kubernetes.pod import Document
from trainyard.errors import ConfigError, InfrastructureError

WATCH_SECONDS = 240
"""The server ends a watch after so long; the next one goes on where it was."""
LATE_SECONDS = 30.0
"""So much later than it should a watch may end before the connection counts as lost."""
SILENT_SECONDS = 300.0
"""A log without a line for so long is asked for anew: the connection may be gone unseen."""

OF_RIGHTS = re.compile(r'User "[^"]*" cannot ')
"""A refusal by RBAC. Quotas, webhooks and policies refuse with 403, too, and in other words."""

KINDS = {
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "JobSet": f"/apis/{JOBSET}/namespaces/{{namespace}}/jobsets",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Event": "/api/v1/namespaces/{namespace}/events",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: Document


class KubernetesClient:
    """One namespace of a cluster."""

    def __init__(
        self,
        namespace: str,
        kubeconfig: str | None = None,
        context: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.namespace = namespace
        self.patience_seconds = patience_seconds
        self._api = KubernetesApi(kubeconfig, context, patience_seconds)

    async def open(self) -> KubernetesClient:
        """Read the credentials; ConfigError where there are none."""
        await self._api.open()
        return self

    async def close(self) -> None:
        """Close all connections; what is still read from them ends."""
        await self._api.close()

    # --- questions and orders -----------------------------------------------------------------

    async def get(self, kind: str, name: str) -> Document | None:
        """An object; None where there is none."""
        try:
            return await self._api.ask("GET", self._path(kind, name))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise self.told(error, "get", kind) from error

    async def find(self, kind: str, key: str) -> tuple[list[Document], str]:
        """The objects that bear the key of a submission, and the version to watch from."""
        return await self._listed(kind, {"labelSelector": f"{KEY_LABEL}={key}"})

    async def events_about(self, name: str) -> list[Document]:
        """What was reported of an object."""
        chosen = f"involvedObject.name={name}"
        return (await self._listed("Event", {"fieldSelector": chosen}))[0]

    async def _listed(self, kind: str, query: Mapping[str, str]) -> tuple[list[Document], str]:
        try:
            found = await self._api.ask("GET", self._path(kind), query)
        except RefusedError as error:
            raise self.told(error, "list", kind) from error
        return found.get("items") or [], (found.get("metadata") or {}).get("resourceVersion", "")

    async def create(self, document: Document, is_trial: bool = False) -> Document:
        """Make an object, or give back the one of its name, which then is ours. is_trial: the
        cluster judges it as if it were made, and keeps nothing."""
        kind, name = document["kind"], document["metadata"]["name"]
        query = {"fieldManager": "trainyard", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if is_trial else {}
        try:
            return await self._api.ask("POST", self._path(kind), query, document)
        except RefusedError as error:
            if error.status != 409:
                raise self.told(error, "create", kind) from error
            refused = error
        there = await self.get(kind, name)
        key = document["metadata"]["labels"][KEY_LABEL]
        if there is not None and (there["metadata"].get("labels") or {}).get(KEY_LABEL) != key:
            raise ConfigError(
                f"{kind} {name} in namespace {self.namespace} is there and is not ours: it does "
                f"not bear the label {KEY_LABEL}={key}"
            )
        if there is None:  # it went while we looked
            raise InfrastructureError(f"{kind} {name}: {refused}") from refused
        return there

    async def own(self, kind: str, name: str, owner: Document) -> None:
        """Let an object go when its owner goes."""
        told = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        try:
            patch = {"metadata": {"ownerReferences": [told]}}
            await self._api.ask("PATCH", self._path(kind, name), None, patch)
        except RefusedError as error:
            raise self.told(error, "patch", kind) from error

    async def delete(self, kind: str, name: str) -> None:
        """Tell the cluster to end and remove an object, its pods first; whether that is done,
        a watch tells."""
        try:
            await self._api.ask(
                "DELETE", self._path(kind, name), {"propagationPolicy": "Foreground"}
            )
        except RefusedError as error:
            if error.status != 404:
                raise self.told(error, "delete", kind) from error

    async def serves_jobsets(self) -> bool:
        """True where the custom resource is installed."""
        try:
            await self._api.ask("GET", f"/apis/{JOBSET}")
        except RefusedError as error:
            if error.status in (403, 404):
                return False
            raise self.told(error, "get", "JobSet") from error
        return True

    # --- streams ------------------------------------------------------------------------------

    async def watch(self, kind: str, key: str, version: str) -> AsyncGenerator[Change]:
        """Changes since a version, until the server ends the watch; GoneError when it keeps none
        from then, AwayError when the connection is lost."""
        query = {
            "labelSelector": f"{KEY_LABEL}={key}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with self._api.stream(
            self._path(kind), query, WATCH_SECONDS + LATE_SECONDS
        ) as batches:
            async for line in (line async for batch in batches for line in batch):
                event = json.loads(line)
                document = event["object"]
                if event["type"] == "ERROR":
                    raise error_of(int(document.get("code") or 0), document)
                yield Change(event["type"], document)

    async def log(self, pod: str, container: str, since: str) -> AsyncGenerator[list[bytes]]:
        """The lines of a pod's log, each behind its time, a few at once as they come, until its
        container has ended. since: whole seconds, or empty for all; AwayError when the connection
        is lost."""
        query = {"container": container, "follow": "true", "timestamps": "true"}
        query |= {"sinceTime": since} if since else {}
        path = f"{self._path('Pod', pod)}/log"
        async with self._api.stream(path, query, SILENT_SECONDS) as batches:
            async for lines in batches:
                yield lines

    def _path(self, kind: str, name: str = "") -> str:
        path = KINDS[kind].format(namespace=self.namespace)
        return f"{path}/{name}" if name else path

    def told(self, error: RefusedError, verb: str, kind: str) -> Exception:
        """The refusal as an error for people."""
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
                f"{what}: {error}; the namespace or the kind is not there (kubectl get namespace "
                f"{self.namespace})"
            )
        return ConfigError(f"{what} was refused: {error}. Correct the options of the yard")
