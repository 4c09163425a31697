"""Step folders of a run: names, lookup, the documents around the tensors, publishing.

A run folder holds `iter_0000050/`, `iter_0000100/`, ...; a step exists if its manifest does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.error_text import what_is_there
from trainyard.artifacts.manifest import (
    Manifest,
    ManifestSlot,
    publish,
    read_listed_json,
    read_manifest,
    read_slot,
    retire,
)
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import basename, check_relative, join, local_path
from trainyard.errors import ArtifactError, ConfigError

FORMAT_VERSION = 1
"""Format version of the documents of a step."""

INDEX = "index.json"
STATE = "state.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer"
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file beside its steps, with the name of the latest."""

STEP_FOLDER = re.compile(r"iter_(\d{7,})")


def step_folder(step: int) -> str:
    """Name of a step's folder, as Megatron-LM writes it."""
    return f"iter_{step:07d}"


def step_of(name: str) -> int | None:
    """The step of a folder name; None for any other name."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match and step_folder(int(match[1])) == name else None


def find_steps(root_url: str, lineage: str | None = None) -> list[int]:
    """Steps that exist in a run folder, ascending; with `lineage`, only those of that run."""
    found = []
    for step in published_steps(root_url):
        manifest = manifest_of(join(root_url, step_folder(step)))
        if manifest is not None and lineage in (None, manifest.lineage):
            found.append(step)
    return found


def _latest(root_url: str) -> tuple[int, Manifest] | None:
    """The highest step that exists in a run folder, with its manifest, read once: the step may be
    removed at any time."""
    for step in reversed(published_steps(root_url)):
        manifest = manifest_of(join(root_url, step_folder(step)))
        if manifest is not None:
            return step, manifest
    return None


def published_steps(root_url: str) -> list[int]:
    """Steps of a run folder with a manifest, complete or not; ascending."""
    names = (name.split("/") for name in store.list_files(root_url))
    steps = (step_of(parts[0]) for parts in names if len(parts) == 2 and parts[1] == MANIFEST)
    return sorted(step for step in steps if step is not None)


def manifest_of(step_url: str) -> Manifest | None:
    """The manifest of a step; None if it is missing or being replaced.

    Raises ArtifactError for a damaged one."""
    check_inside(step_url, [MANIFEST])
    found = read_manifest(join(step_url, MANIFEST))
    return None if found is None else found[0]


def step_document(step_url: str, name: str) -> Any:
    """A JSON document of a published step, as its manifest lists it."""
    manifest = manifest_of(step_url)
    record = None if manifest is None else manifest.record(name)
    return read_listed_json(join(step_url, name), record)


def locate_step(url: str, option: str) -> tuple[str, Manifest]:
    """The step folder of a URL (a step, or the latest step of a run) and its manifest.

    Raises an error that names `option`: ArtifactError if nothing is there, as for any input that is
    missing, else ConfigError, with what was found instead."""
    url = url.rstrip("/") or url
    if store.exists(join(url, INDEX)):
        manifest = manifest_of(url)
        if manifest is None:
            raise ConfigError(
                f"{option} {url}: this step has no manifest.json, so its save did not finish"
            )
        return url, manifest
    found = _latest(url) or _latest(url)  # a run may remove all listed steps after newer ones
    if found is None:
        kind = ConfigError if store.exists(url) or store.list_files(url) else ArtifactError
        raise kind(f"{option} {url}: no checkpoint there; {_found(url, option)}")
    step, manifest = found
    return join(url, step_folder(step)), manifest


def remove_step(root_url: str, step: int) -> None:
    """Remove a step; its manifest first, so that it never exists in part."""
    url = join(root_url, step_folder(step))
    store.delete(join(url, MANIFEST))
    store.delete_tree(url)


def check_inside(step_url: str, names: Iterable[str]) -> None:
    """Raise ArtifactError for a link out of a local step folder, and for a special file in it.

    Checks `names` and everything in the tokenizer folder. The step folder itself may be a link."""
    path = local_path(step_url)
    if path is None:
        return
    root = os.path.realpath(path)
    listed = [*names, TOKENIZER]
    for folder, folders, files in os.walk(path / TOKENIZER):
        inner = os.path.relpath(folder, path)
        listed += [os.path.join(inner, name) for name in (*folders, *files)]
    for name in listed:
        at = path / name
        if "/" not in name and at.is_file() and not at.is_symlink():
            continue  # most names
        target = os.path.realpath(at)
        if os.path.commonpath([root, target]) != root:
            raise ArtifactError(f"{join(step_url, name)}: a link to {target}, outside the step")
        if os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target)):
            raise ArtifactError(f"{join(step_url, name)}: not a file")


def _found(url: str, option: str) -> str:
    """What is at a URL without a checkpoint, for a message."""
    convert = "leave --loader out" if option == "--load-dir" else "convert it with stages.reshard"
    if store.exists(url):
        return "it is a file; give the folder of a run, or a step folder iter_XXXXXXX in it"
    names = list(store.list_files(url))
    if not names:
        return what_is_there(url)
    unfinished = sorted({n.split("/")[0] for n in names if step_of(n.split("/")[0]) is not None})
    if TRACKER in names:
        if any(name.endswith((".pt", ".distcp")) for name in names):
            return f"it is a checkpoint of Megatron-LM; {convert}"
        return (
            f"it has Megatron-LM's {TRACKER} but not the weights: copy the folder iter_XXXXXXX "
            "(or release) that the file names as well"
        )
    if unfinished:
        return f"{', '.join(unfinished[:5])} without a manifest.json: that save did not finish"
    if CONFIG in names and any(name.endswith(".safetensors") for name in names):
        return f"it is a Hugging Face folder; {convert}"
    if step_of(basename(url)) is not None:
        return "it is a step folder without an index.json: that save did not finish"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"found {', '.join(names[:5])}{more}; no step folder iter_XXXXXXX with a manifest.json"


# --- writing a step ---------------------------------------------------------------------------


def clear_step(step_url: str, by: str) -> ManifestSlot | None:
    """Clear a step folder: retire its manifest, then remove the files of an older save.

    Returns what `publish_step` has to replace; None if there was no manifest."""
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


def publish_step(step_url: str, manifest: Manifest, slot: ManifestSlot | None) -> list[FileRecord]:
    """Publish a step's manifest; returns the records of its files relative to the run folder."""
    url = join(step_url, MANIFEST)
    publish(url, manifest, slot.version if slot is not None else None)
    data = store.read_bytes(url)
    own = FileRecord(MANIFEST, len(data), digest_bytes(data), volatile=True)
    folder = step_url.rstrip("/").rpartition("/")[2]
    return [replace(record, path=f"{folder}/{record.path}") for record in (*manifest.files, own)]
