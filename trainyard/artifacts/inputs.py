"""Inputs: the files behind a URL, and their digest.

The digest of an input with a manifest comes from the manifest, without reading. A raw file is read
once; its digest is cached by URL, size and version."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import Any, TypeVar

from trainyard.artifacts import store
from trainyard.artifacts.by_version import remembered
from trainyard.artifacts.digest import digest_bytes, digest_document, digest_files, hasher
from trainyard.artifacts.error_text import why_absent
from trainyard.artifacts.manifest import Manifest, check_digest, read_manifest, read_slot
from trainyard.artifacts.output import FINAL_NAMES, MANIFEST, PARTS, Output, is_housekeeping
from trainyard.artifacts.store import FileInfo, FileRecord, SourceFile
from trainyard.artifacts.strict_json import check_depth, parse_json
from trainyard.artifacts.urls import (
    basename,
    has_glob,
    is_local,
    is_web,
    join,
    local_path,
    parent,
)
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_THREADS = 16

MAX_ASKED = 8
"""Files of one folder that are asked for one by one, before the folder is listed."""

PAIR = (".bin", ".idx")
SIDECAR = ".docs"


@dataclass(frozen=True, slots=True)
class Input:
    """A named input of a stage, resolved."""

    name: str
    urls: tuple[str, ...]
    files: tuple[str, ...]
    """URLs of all its files, in reading order."""
    digest: str


OfRaw = Callable[[str], str]
"""What stands for the contents of a file that no manifest lists, by its URL."""


def resolve(
    name: str, urls: Sequence[str], manifests: Manifests | None = None, of_raw: OfRaw | None = None
) -> Input:
    """The files behind the URLs of one input, in order, and their digest.

    manifests: what was read for other inputs of the same decision. of_raw: instead of `raw_digest`.
    Raises ArtifactError for a URL without files, and for an artifact that is being written."""
    manifests = Manifests() if manifests is None else manifests
    parts = each_of(lambda url: _resolve_one(url, manifests, of_raw), urls)
    files = tuple(file for files, _ in parts for file in files)
    digests = [digest for _, digest in parts]
    digest = digests[0] if len(digests) == 1 else digest_document(digests)
    return Input(name, tuple(urls), files, digest)


def _resolve_one(url: str, manifests: Manifests, of_raw: OfRaw | None) -> tuple[list[str], str]:
    if has_glob(url):
        return _files_alone(store.expand(url), manifests, of_raw)
    pair = [] if is_web(url) else [url + end for end in PAIR if manifests.exists(url + end)]
    for manifest_url, base in _own_manifests(url):
        if base == url and not manifests.exists(manifest_url):
            continue
        if base != url and len(pair) == len(PAIR):
            break  # a pair, and no folder: spares a request for each of many
        found = manifests.read(manifest_url)
        if found is not None:
            return _files_of(found, base), found.output_digest
    if manifests.exists(url):
        return _files_alone([url], manifests, of_raw)
    if pair:
        # Not in the digest: the sidecar names locations, and tokens do not depend on them.
        sidecar = [url + SIDECAR] if manifests.exists(url + SIDECAR) else []
        return sorted([*pair, *sidecar]), _files_alone(pair, manifests, of_raw)[1]
    if not is_web(url) and manifests.exists(url + PARTS):
        return _files_alone([url + PARTS], manifests, of_raw)
    return _folder(url, manifests, of_raw)


def each_of(work: Callable[[str], T], urls: Sequence[str]) -> list[T]:
    """The results of `work`; at remote places in threads, since each waits for a request."""
    if len(urls) < 2 or all(map(is_local, urls)):
        return [work(url) for url in urls]
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="inputs") as threads:
        return list(threads.map(work, urls))


def check_exists(url: str) -> None:
    """Raise ArtifactError for a URL without files, as `resolve` does, but read no file."""
    if has_glob(url) or store.exists(url):
        store.expand(url)
        return
    manifests = Manifests()
    if any(manifests.read(manifest_url) for manifest_url, _ in _own_manifests(url)):
        return
    if not any(store.exists(url + ending) for ending in (*PAIR, PARTS)):
        _files_in(url)


def metrics_of(url: str) -> dict[str, Any]:
    """The metrics of the artifact that a file belongs to; empty if no manifest lists the file."""
    manifest = Manifests().listing(url)
    return {} if manifest is None else manifest.metrics


def _own_manifests(url: str) -> list[tuple[str, str]]:
    """Possible manifest URLs of an artifact at this URL, each with the base of its file names."""
    if is_web(url):  # nothing is published there, and many servers refuse a missing name
        return []
    return [(f"{url}.{MANIFEST}", url), (join(url, MANIFEST), url.rstrip("/") + "/")]


def _files_of(manifest: Manifest, base: str) -> list[str]:
    """The files in the output digest, the sidecar of document sources, which is not in it, and the
    manifests of parts."""
    files = manifest.files
    listed = [one.path for one in files if not one.volatile or one.path.endswith(SIDECAR)]
    parts = [f"{part.path}/{MANIFEST}" for part in manifest.parts]
    return [base + path for path in sorted([*listed, *parts])]


def _files_alone(
    urls: list[str], manifests: Manifests, of_raw: OfRaw | None
) -> tuple[list[str], str]:
    digests = each_of(lambda file: manifests.file_digest(file, of_raw), urls)
    if len(urls) == 1:
        return urls, digests[0]
    sizes = (manifests.size(url) for url in urls)
    return urls, digest_files(zip(map(basename, urls), sizes, digests, strict=True))


def _folder(url: str, manifests: Manifests, of_raw: OfRaw | None) -> tuple[list[str], str]:
    root, files = url.rstrip("/") + "/", _files_in(url)
    names = [file.removeprefix(root) for file in files]
    sizes = map(manifests.size, files)
    digests = each_of(lambda file: manifests.file_digest(file, of_raw), files)
    return files, digest_files(zip(names, sizes, digests, strict=True))


def _files_in(url: str) -> list[str]:
    """The files of a folder; ArtifactError if it has none."""
    root = url.rstrip("/") + "/"
    files = [file for file in store.expand(url) if not is_housekeeping(file.removeprefix(root))]
    if not files:
        raise ArtifactError(f"{url}: no file in this folder; check the path")
    return files


class Manifests:
    """Manifests and folder listings of one decision, each read once."""

    def __init__(self) -> None:
        self._read: dict[str, Manifest | None] = {}
        self._listed: dict[str, dict[str, FileInfo]] = {}
        self._records: dict[str, dict[str, FileRecord]] = {}
        self._asked: Counter[str] = Counter()
        self._sought: Counter[str] = Counter()
        self._listing_lock = Lock()

    def exists(self, url: str) -> bool:
        """Whether there is a file of that name. Beyond a few names in one folder, from a listing:
        one request for a thousand."""
        if is_web(url):
            return store.exists(url)  # a web server lists no folder
        folder = parent(url)
        if folder not in self._listed:
            self._asked[folder] += 1
            if self._asked[folder] <= MAX_ASKED:
                return store.exists(url)
        return basename(url) in self._folder(folder)

    def lists(self, url: str) -> bool:
        """Whether there is a file of that name, from the listing of its folder, which `record`
        needs too."""
        return store.exists(url) if is_web(url) else basename(url) in self._folder(parent(url))

    def read(self, url: str) -> Manifest | None:
        """The manifest at a URL, None when there is none.

        Raises ArtifactError for one that a run is replacing: its files do not exist."""
        if url not in self._read:
            found = read_manifest(url)
            if found is None and read_slot(url) is not None:
                raise ArtifactError(
                    f"{url}: a run was replacing this artifact and has not finished; rerun that "
                    "stage"
                )
            self._read[url] = found[0] if found is not None else None
        return self._read[url]

    def size(self, url: str) -> int:
        """Bytes of a file, from the listing of its folder if there is one."""
        listed = self._listed.get(parent(url), {}).get(basename(url))
        return (listed or store.info(url)).size_bytes

    def info(self, url: str) -> FileInfo:
        """As `store.info`; of a file in an object store, from the listing of its folder."""
        if is_local(url) or is_web(url):
            return store.info(url)
        return self._folder(parent(url)).get(basename(url)) or store.info(url)

    def file_digest(self, url: str, of_raw: OfRaw | None = None) -> str:
        """The digest of one file: of its manifest, else by `raw_digest`, or `of_raw`."""
        record = self.listed(url)
        return (of_raw or raw_digest)(url) if record is None else record.digest

    def listed(self, url: str) -> FileRecord | None:
        """The record that gives the digest of a file; None if none lists it with its size."""
        record = self.record(url)
        return record if record is not None and record.size_bytes == self.size(url) else None

    def record(self, url: str) -> FileRecord | None:
        """The file's record in the manifest of its artifact; None if no manifest lists it."""
        found = self._listing(url)
        return found[1] if found else None

    def listing(self, url: str) -> Manifest | None:
        """The manifest of the artifact that a file belongs to; None if no manifest lists it."""
        found = self._listing(url)
        return self.read(found[0]) if found else None

    def _listing(self, url: str) -> tuple[str, FileRecord] | None:
        """The URL of the manifest that lists a file, and the file's record in it."""
        folder, name = parent(url), basename(url)
        for manifest in self._covering(folder, name):
            manifest_url = join(folder, manifest)
            try:
                record = self._by_name(manifest_url).get(name)
            except ArtifactError:
                if _may_be_replacing(manifest_url, name):
                    raise
                continue
            if record is not None:
                return manifest_url, record
        return None

    def _covering(self, folder: str, name: str) -> list[str]:
        """Manifests in a folder that may list the file: the folder's, or one of its prefix."""
        names = [MANIFEST, *(f"{name[:end]}.{MANIFEST}" for end in range(1, len(name) + 1))]
        self._sought[folder] += 1
        if is_local(folder) and self._sought[folder] <= MAX_ASKED and folder not in self._listed:
            # Of a few files: their folder may have thousands of others.
            return store.existing(folder, names)
        listed = self._folder(folder)  # looked up by name: there may be thousands of both
        return [name for name in names if name in listed]

    def _by_name(self, url: str) -> dict[str, FileRecord]:
        if url not in self._records:
            prefix = basename(url).removesuffix(MANIFEST).removesuffix(".")
            manifest = self.read(url)
            files = manifest.files if manifest is not None else ()
            self._records[url] = {prefix + record.path: record for record in files}
        return self._records[url]

    def _folder(self, url: str) -> dict[str, FileInfo]:
        with self._listing_lock:
            if url not in self._listed:
                self._listed[url] = store.look_at_folder(url)
            return self._listed[url]


def read_checked(url: str) -> bytes:
    """The contents of a file; ArtifactError if a manifest lists it with another digest."""
    data = store.read_bytes(url)
    record = Manifests().record(url)
    if record is not None:
        check_digest(url, record, digest_bytes(data))
    return data


def read_checked_json(url: str) -> Any:
    """A JSON document, read with `read_checked`."""
    document = parse_json(read_checked(url), url)
    check_depth(document, url)
    return document


def check_listed(url: str, manifests: Manifests) -> None:
    """Read a file and raise ArtifactError if a manifest lists it with another digest."""
    record = manifests.record(url)
    if record is not None:
        check_digest(url, record, read_digest(url, manifests.info))


def read_folder(folder: str) -> dict[str, FileRecord]:
    """The files that the manifest of a folder lists, those in subfolders included; empty without a
    manifest."""
    found = read_manifest(join(folder, MANIFEST))
    return {} if found is None else {record.path: record for record in found[0].files}


def check_in_folder(folder: str, path: str) -> None:
    """Read a file and raise ArtifactError if the manifest of its folder has another digest."""
    record = read_folder(folder).get(path)
    if record is not None:
        url = join(folder, path)
        check_digest(url, record, read_digest(url))


def check_version(folder: str, path: str) -> None:
    """As `check_in_folder`, but a version of a file is read once, as long as its digest is cached:
    for large files that every start of a training reads here and there."""
    record = read_folder(folder).get(path)
    if record is not None:
        url = join(folder, path)
        check_digest(url, record, raw_digest(url))


def check_all_listed(urls: Iterable[str]) -> None:
    """`check_listed` for each; a file that no manifest lists is not read."""
    manifests = Manifests()
    for url in urls:
        check_listed(url, manifests)


def _may_be_replacing(manifest_url: str, name: str) -> bool:
    """Whether a file may belong to the artifact whose manifest is missing or broken, and does not
    merely share its prefix."""
    prefix = manifest_url.removesuffix("." + MANIFEST)
    slot = read_slot(manifest_url)
    if slot is None or not slot.files or basename(manifest_url) == MANIFEST:
        return True
    work = Output.prefix(prefix).work_url
    records = [name for name in store.list_files(work) if name.startswith(FINAL_NAMES)]
    started = {final for record in records for final in store.read_json(join(work, record))}
    return name.removeprefix(basename(prefix)) in started.union(slot.files)


# --- raw files --------------------------------------------------------------------------------


def raw_digest(url: str) -> str:
    """The digest of a file that no manifest lists: from the cache, or from its contents."""
    return str(remembered(url, "digest", lambda: read_digest(url)))


def read_digest(url: str, look: Callable[[str], FileInfo] = store.info) -> str:
    """The digest of a file's contents, by reading all of it. look: says which version to read."""
    running = hasher()
    if not is_local(url):
        found = look(url)
        for block in store.read_files([SourceFile(url, found.size_bytes, found.version)]):
            running.update(block)
        return str(running.hexdigest())
    with store.open_input(url) as file:
        while piece := file.read(store.CHUNK):
            running.update(piece)
    return str(running.hexdigest())


# --- local copies -------------------------------------------------------------------------------


def download(url: str, target: Path) -> None:
    """Copy a file to this machine; it appears there when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=target.parent, delete=False) as copy:
        try:
            for block in store.read_whole(url):
                copy.write(block)
        except BaseException:
            Path(copy.name).unlink()
            raise
    Path(copy.name).replace(target)


def fetch(url: str, folder: Path) -> Path:
    """A local path with the contents of a URL: the file itself, or a copy under `folder`."""
    path = local_path(url)
    if path is not None:
        if not store.exists(url):
            raise ArtifactError(f"{url}: {why_absent(url)}")
        return path
    target = folder / f"{digest_bytes(url.encode())[:16]}-{basename(url)}"
    if not target.exists():
        download(url, target)
    return target
