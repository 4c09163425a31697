"""The objects of one submission, as the cluster has them now: listed once, then watched.

A watch that ends is taken up where it was. One that is too old (410) begins with a new list. A
server that stays away for longer than the patience ends the watching, not the job."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from flows.backends.errors import BackendUnavailableError
from flows.backends.kubernetes.api import (
    AwayError,
    GoneError,
    RefusedError,
    waits,
)
from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.pod import Document


class Watched:
    """All objects of a kind that bear a key, also those that are gone, as they were last."""

    def __init__(
        self,
        client: KubernetesClient,
        kind: str,
        key: str,
        news: asyncio.Event,
    ) -> None:
        self.kind = kind
        self.objects: dict[str, Document] = {}
        self.gone: dict[str, Document] = {}
        """By uid: a name may come back."""
        self.is_listed = False
        self._client = client
        self._key = key
        self._news = news
        self._patience = client.patience_seconds
        self._version = ""
        self._last_answer = time.monotonic()
        self._tries = 0

    def everything(self) -> list[Document]:
        """What is there and what was."""
        return [*self.gone.values(), *self.objects.values()]

    async def run(self) -> None:
        """Watch until cancelled; PlaceAwayError when nobody answers for too long."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except GoneError:
                self._version = ""
            except AwayError as error:
                await self._wait(error)
            except RefusedError as error:  # what may be listed may be watched, but for a moment
                if error.status not in (401, 403):
                    raise self._client.told(error, "watch", self.kind) from error
                self._version = ""
                await self._wait(error)

    async def _list(self) -> None:
        found, version = await self._client.find(self.kind, self._key)
        self._heard()
        names = {document["metadata"]["name"]: document for document in found}
        for name, old in list(self.objects.items()):
            new = names.get(name)
            if new is None or new["metadata"]["uid"] != old["metadata"]["uid"]:
                self._remove(old)
        self.objects = names
        self._version, self.is_listed = version, True
        self._news.set()

    async def _watch(self) -> None:
        async with aclosing(self._client.watch(self.kind, self._key, self._version)) as changes:
            async for change in changes:
                self._heard()
                self._version = change.object["metadata"]["resourceVersion"]
                if change.type == "BOOKMARK":
                    continue
                if change.type == "DELETED":
                    self._remove(change.object)
                else:
                    self.objects[change.object["metadata"]["name"]] = change.object
                self._news.set()
        self._last_answer = time.monotonic()  # it ended as it should

    def _remove(self, document: Document) -> None:
        meta = document["metadata"]
        self.gone[meta["uid"]] = document
        there = self.objects.get(meta["name"])
        if there is not None and there["metadata"]["uid"] == meta["uid"]:
            del self.objects[meta["name"]]

    def _heard(self) -> None:
        self._last_answer, self._tries = time.monotonic(), 0

    async def _wait(self, error: Exception) -> None:
        silent = time.monotonic() - self._last_answer
        planned = waits(self._patience)
        if silent > self._patience or not planned:
            raise BackendUnavailableError(
                f"the API server of Kubernetes is away since {silent:.0f} s (watching "
                f"{self.kind}): {error}"
            ) from error
        await asyncio.sleep(planned[min(self._tries, len(planned) - 1)])
        self._tries += 1
