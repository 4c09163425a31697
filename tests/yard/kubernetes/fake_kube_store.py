"""The objects of the stand-in for an API server, with versions and the changes that led to them."""

from __future__ import annotations

import asyncio
import time
import uuid
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def matches(document: Document, selector: str) -> bool:
    """Whether labels are as `a=b,c=d` says."""
    labels = document["metadata"].get("labels") or {}
    pairs = [part.replace("==", "=").partition("=") for part in selector.split(",") if part]
    return all(labels.get(name) == value for name, _, value in pairs)


@dataclass
class Store:
    """What etcd would hold."""

    objects: dict[Key, Document] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    """Changes before this version are forgotten: a request for them gets 410."""
    changes: list[tuple[int, str, str, Document]] = field(default_factory=list)
    """Version, ADDED or MODIFIED or DELETED, plural, object."""
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    waking: asyncio.Future[None] | None = None

    def get(self, plural: str, namespace: str, name: str) -> Document | None:
        return self.objects.get((plural, namespace, name))

    def all(self, plural: str, namespace: str, selector: str = "") -> list[Document]:
        return [
            one
            for (kind, place, _), one in self.objects.items()
            if kind == plural and place == namespace and matches(one, selector)
        ]

    def add(self, plural: str, namespace: str, document: Document) -> Document:
        meta = document["metadata"]
        meta |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        document.setdefault("status", {})
        self.objects[plural, namespace, meta["name"]] = document
        self._note("ADDED", plural, document)
        return document

    def touch(self, plural: str, document: Document) -> None:
        """It was changed."""
        self._note("MODIFIED", plural, document)

    def remove(self, plural: str, document: Document) -> None:
        meta = document["metadata"]
        if self.objects.pop((plural, meta["namespace"], meta["name"]), None) is not None:
            self._note("DELETED", plural, document)

    def forget(self) -> None:
        """Compact: whoever watches from an earlier version must list again."""
        self.oldest = self.version
        self.changes.clear()

    def _note(self, kind: str, plural: str, document: Document) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append((self.version, kind, plural, deepcopy(document)))
        self.waking = asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        async with self.news:
            self.news.notify_all()
