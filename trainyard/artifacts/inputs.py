"""Inputs: which files stand behind a URL, and the digest that they count by.

The digest of an input with a manifest is the manifest's: nothing is read. A raw file is read once
and remembered by URL, size and version."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes, digest_document, digest_files, hasher
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST, is_housekeeping
from trainyard.artifacts.urls import basename, has_glob, is_local, join, local_path, parent
from trainyard.errors import ArtifactError

SETTLED_SECONDS = 2.0
"""A file younger than this may change again within the resolution of its modification time."""


@dataclass(frozen=True, slots=True)
class Input:
    """A named input of a stage, resolved."""

    name: str
    urls: tuple[str, ...]
    files: tuple[str, ...]
    """URL of every file behind it, in the order in which they are to be read."""
    digest: str


def resolve(name: str, urls: Sequence[str]) -> Input:
    """The files behind the URLs of one input, in order, and their digest.

    Raises ArtifactError when a URL stands for nothing."""
    parts = [_resolve_one(url) for url in urls]
    files = tuple(file for files, _ in parts for file in files)
    digests = [digest for _, digest in parts]
    digest = digests[0] if len(digests) == 1 else digest_document(digests)
    return Input(name, tuple(urls), files, digest)


def _resolve_one(url: str) -> tuple[list[str], str]:
    for manifest_url, base in (
        (f"{url}.{MANIFEST}", url),
        (join(url, MANIFEST), url.rstrip("/") + "/"),
    ):
        found = None if has_glob(url) else read_manifest(manifest_url)
        if found is not None:
            return _files_of(found[0], base), found[0].output_digest
    if has_glob(url) or store.exists(url):
        return _files_alone(store.expand(url))
    siblings = _prefixed(url)
    if siblings:
        return _files_alone(siblings)
    return _folder(url)


def _files_of(manifest: Manifest, base: str) -> list[str]:
    return [
        base + record.path
        for record in sorted(manifest.files, key=lambda f: f.path)
        if not record.volatile
    ]


def _files_alone(urls: list[str]) -> tuple[list[str], str]:
    if len(urls) == 1:
        return urls, file_digest(urls[0])
    return urls, digest_files((basename(u), store.info(u).size_bytes, file_digest(u)) for u in urls)


def _prefixed(url: str) -> list[str]:
    """Files that share a prefix, such as the .bin and .idx of Megatron's token files."""
    return [url + ending for ending in (".bin", ".idx") if store.exists(url + ending)]


def _folder(url: str) -> tuple[list[str], str]:
    if _has_unfinished_manifest(url):
        raise ArtifactError(
            f"{url}: a run was replacing this artifact and has not finished; rerun that stage"
        )
    root = url.rstrip("/") + "/"
    files = [file for file in store.expand(url) if not is_housekeeping(file.removeprefix(root))]
    if not files:
        raise ArtifactError(f"{url}: no file in this folder; check the path")
    names = [file[len(root) :] if file.startswith(root) else basename(file) for file in files]
    sizes = (store.info(file).size_bytes for file in files)
    return files, digest_files(zip(names, sizes, map(file_digest, files), strict=True))


def _has_unfinished_manifest(url: str) -> bool:
    return store.exists(join(url, MANIFEST))  # it was there, yet read_manifest did not return it


# --- single files -----------------------------------------------------------------------------


def file_digest(url: str) -> str:
    """The digest of one file: from the manifest that lists it, from the cache, or by reading."""
    listed = _listed_digest(url)
    return listed if listed is not None else _raw_digest(url)


def _listed_digest(url: str) -> str | None:
    """The digest by which a finished artifact in the same folder lists this file."""
    found = read_manifest(join(parent(url), MANIFEST))
    record = found[0].record(basename(url)) if found is not None else None
    if record is not None and record.size_bytes == store.info(url).size_bytes:
        return record.digest
    return None


def cache_folder() -> Path:
    """Where digests of raw inputs are remembered: TRAINYARD_CACHE, else the user's cache folder."""
    chosen = os.environ.get("TRAINYARD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"


def _raw_digest(url: str) -> str:
    path = local_path(url)
    absolute = str(path.resolve()) if path is not None else url
    found = store.info(url)
    entry = cache_folder() / "digests" / f"{digest_bytes(absolute.encode())[:32]}.json"
    state = [absolute, found.size_bytes, found.version]
    try:
        cached = json.loads(entry.read_text())
        if cached["state"] == state:
            return str(cached["digest"])
    except (OSError, ValueError, KeyError):
        pass
    digest = read_digest(url)
    if _is_settled(url):
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"state": state, "digest": digest}))
        temporary.replace(entry)
    return digest


def _is_settled(url: str) -> bool:
    path = local_path(url)
    return not is_local(url) or (
        path is not None and time.time() - path.stat().st_mtime > SETTLED_SECONDS
    )


def read_digest(url: str) -> str:
    """The digest of a file's contents, by reading all of it."""
    running = hasher()
    with store.open_input(url) as file:
        while piece := file.read(store.CHUNK):
            running.update(piece)
    return str(running.hexdigest())
