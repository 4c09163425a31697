"""What stands around the tensors of a step while it is written: room, documents, the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest, Slot, publish, read_slot, retire
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import check_relative, join
from trainyard.checkpoint.index import FORMAT_VERSION


def clear_step(step_url: str, by: str) -> Slot | None:
    """Make room for a step: retire its manifest first, then remove what an older save left there.

    Returns what `publish_step` has to replace; None when the place was free."""
    manifest_url = join(step_url, MANIFEST)
    slot = read_slot(manifest_url)
    if slot is not None:
        slot = retire(manifest_url, slot, by)
    for name in store.list_files(step_url):
        if name != MANIFEST:
            store.delete(join(step_url, name))
    return slot


def encode_document(document: Mapping[str, Any]) -> bytes:
    """A JSON document with its format version, equal for equal contents."""
    versioned = {"format_version": FORMAT_VERSION, **document}
    return (json.dumps(versioned, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_contents(step_url: str, contents: Mapping[str, bytes]) -> list[FileRecord]:
    """Write files by their names in the step."""
    return [
        store.write_bytes(join(step_url, check_relative(name)), data, name)
        for name, data in sorted(contents.items())
    ]


def publish_step(step_url: str, manifest: Manifest, slot: Slot | None) -> list[FileRecord]:
    """Publish the manifest of a step; the records of its files relative to the run folder."""
    url = join(step_url, MANIFEST)
    publish(url, manifest, slot.version if slot is not None else None)
    data = store.read_bytes(url)
    own = FileRecord(MANIFEST, len(data), digest_bytes(data), volatile=True)
    folder = step_url.rstrip("/").rpartition("/")[2]
    return [replace(record, path=f"{folder}/{record.path}") for record in (*manifest.files, own)]
