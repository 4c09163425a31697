"""A stored step: its manifest, documents, index, and tensor files as bytes. For tensors: `load`.

Files are untrusted: a damaged or hostile one is an ArtifactError that names it, and nothing outside
the step folder is read."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, check_digest, read_listed
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.strict_json import check_depth, parse_json, shown
from trainyard.artifacts.urls import basename, is_hidden, join
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.index import Located, TensorEntry, check_version, locate, parse_index
from trainyard.checkpoint.plan import KINDS
from trainyard.checkpoint.safetensors.blocks import BlockCache
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.safetensors.shard import (
    LOCAL_THREADS,
    REMOTE_THREADS,
    ShardFile,
    in_threads,
)
from trainyard.checkpoint.sight import Sight
from trainyard.checkpoint.steps import (
    CONFIG,
    INDEX,
    STATE,
    TOKENIZER,
    check_inside,
    locate_step,
    step_of,
)
from trainyard.errors import ArtifactError

F = TypeVar("F", bound=ShardFile)

Verify: TypeAlias = Literal["none", "sizes", "digests"]
"""Checks of tensor files: none but those needed to read a file; the size of each file read, and the
digest of each block as it is read; or before that the digest of each file, for which all of it is
read once more. Documents are compared by size and digest at every level."""


class ShardFiles(Generic[F]):
    """The tensor files of one step: opened on use, and compared with manifest and index.

    Not thread-safe, except for the methods of `ShardFile`."""

    def __init__(
        self,
        url: str,
        records: Mapping[str, FileRecord],
        index: Mapping[str, TensorEntry],
        verify: Verify,
        open_file: Callable[[str, int | None], F],
    ) -> None:
        """open_file: opens the file of a URL, which must have this many bytes (None: any).

        Raises ArtifactError for an index that does not match the manifest's `records`."""
        self._open_file = open_file
        self._url, self._records, self._verify = url, records, verify
        self._specs: dict[str, set[tuple[str, TensorSpec]]] = defaultdict(set)
        self._digests: dict[str, dict[str, str]] = defaultdict(dict)
        self._lacks_digests: set[str] = set()
        self._cache = BlockCache()
        self._open: dict[str, F] = {}
        self._checked: set[str] = set()
        self.sight: Sight | None = None
        """Which ranks see which files, if not all see all."""
        for name, entry in index.items():
            if name.partition(".")[0] not in KINDS:
                raise ArtifactError(
                    f"{join(url, INDEX)}: tensor {name!r} is not one of {', '.join(KINDS)}"
                )
            for piece in entry.pieces:
                spec = TensorSpec(entry.dtype, piece.shape)
                self._specs[piece.file].add((piece.key, spec))
                self._digests[piece.file][piece.key] = piece.digests
                if spec.size_bytes and not piece.digests:
                    self._lacks_digests.add(piece.file)
        self._check_index()

    def _check_index(self) -> None:
        index_url = join(self._url, INDEX)
        for name, specs in self._specs.items():
            record = self._records.get(name)
            if record is None:
                raise ArtifactError(f"{index_url}: names {name}, which manifest.json does not list")
            size = sum(spec.size_bytes for _, spec in specs)
            if size > record.size_bytes:
                raise ArtifactError(
                    f"{index_url}: says that {name} holds {size} bytes of tensors, manifest.json "
                    f"that it has {record.size_bytes}"
                )

    @property
    def names(self) -> list[str]:
        """Files that hold tensors."""
        return sorted(self._specs)

    def open(self, names: Iterable[str]) -> dict[str, F]:
        """Files by name, checked as `verify` says."""
        files = self.open_unchecked(names)
        self.check(self.unchecked(files))
        return files

    def open_unchecked(self, names: Iterable[str]) -> dict[str, F]:
        """Files by name, whose digests may not have been compared yet."""
        asked = sorted(set(names))
        new = [name for name in asked if name not in self._open]
        # Requests for headers of remote files wait for each other otherwise.
        for name, file in zip(new, in_threads(self._opened, new, REMOTE_THREADS), strict=True):
            self._open[name] = file
        return {name: self._open[name] for name in asked}

    def _opened(self, name: str) -> F:
        record = self._records[name]
        size = None if self._verify == "none" else record.size_bytes
        file = self._open_file(join(self._url, name), size)
        try:
            _check_contents(file, self._specs[name])
            if self._verify != "none":
                file.expect(self._digests[name], self._cache)
        except BaseException:
            file.close()
            raise
        return file

    def unchecked(self, names: Iterable[str]) -> list[str]:
        """Names of files whose digest must be compared before their values are used, sorted: in
        steps without digests of blocks, all."""
        left = sorted(set(names) - self._checked)
        if self._verify == "sizes":
            return [name for name in left if name in self._lacks_digests]
        return left if self._verify == "digests" else []

    def check(self, names: Sequence[str]) -> None:
        """Read open files completely; ArtifactError for one that differs from the published one."""
        files = [self._open[name] for name in names]
        digests = in_threads(ShardFile.digest, files, LOCAL_THREADS)
        for name, digest in zip(names, digests, strict=True):
            check_digest(join(self._url, name), self._records.get(name), digest)
        self.mark_checked(names)

    def mark_checked(self, names: Iterable[str]) -> None:
        """Record that the digests of these files were compared."""
        self._checked.update(names)

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._checked.clear()


def _check_contents(file: ShardFile, specs: Iterable[tuple[str, TensorSpec]]) -> None:
    for key, spec in specs:
        extent = file.extents.get(key)
        if extent is None or extent.spec != spec:
            held = "no such tensor" if extent is None else extent.spec.text
            raise ArtifactError(
                f"{file.url}: {INDEX} says {key!r} is {spec.text}, the file holds {held}"
            )


log = logging.getLogger(__name__)

MOST_LOOKS = 5
"""Attempts to open the latest step while the run removes old steps."""

S = TypeVar("S", bound="StoredStep[Any]")


class StoredStep(Closing, Generic[F]):
    """A published step. Use as a context manager, or call `close` after reading."""

    def __init__(
        self,
        url: str,
        manifest: Manifest,
        verify: Verify,
        open_file: Callable[[str, int | None], F],
    ) -> None:
        """open_file: opens a tensor file at a URL that must have this many bytes (None: any)."""
        self.url = url
        self.manifest = manifest
        self.verify = verify
        self._records = {record.path: record for record in manifest.files}
        check_inside(url, self._records)
        self.index: dict[str, TensorEntry] = parse_index(self._parsed(INDEX), join(url, INDEX))
        self.files = ShardFiles(url, self._records, self.index, verify, open_file)

    def check(self, apart_from: Collection[str] = ()) -> None:
        """Check all files of the step as `verify` says, even those that are not read later.

        apart_from: files to skip. Raises ArtifactError for the first file that differs from the
        published one."""
        if CONFIG in self._records:  # steps of a user's own loop may have none
            self.document(CONFIG)
        if self.verify == "none":
            return
        sizes = store.list_files(self.url)
        for name in sorted(self._records.keys() - set(apart_from)):
            record = self._records[name]
            if sizes.get(name) != record.size_bytes:
                found = f"{sizes[name]} bytes" if name in sizes else "missing"
                raise ArtifactError(
                    f"{join(self.url, name)}: {found}, manifest.json says {record.size_bytes} bytes"
                )
        if self.verify == "digests":
            self.files.open(self.files.names)
            for name in sorted(self._records.keys() - {*self.files.names, *apart_from}):
                self.read_file(name)

    # --- documents ------------------------------------------------------------------------

    @cached_property
    def state(self) -> dict[str, Any]:
        """Position of the run, from its trainer: step, consumed samples, schedule."""
        return self.document(STATE)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Configuration of the model and of its run."""
        return self.document(CONFIG)

    @property
    def step(self) -> int:
        """Training steps done."""
        step = self.state.get("step")
        if type(step) is not int or step < 0:
            raise ArtifactError(f"{join(self.url, STATE)}: step is {shown(step)}, not a count")
        return step

    @property
    def digest(self) -> str:
        """Digest of the contents of the step; does not depend on its URL."""
        return self.manifest.output_digest

    @property
    def tokenizer_url(self) -> str:
        """Folder of the step's tokenizer files."""
        return join(self.url, TOKENIZER)

    def tokenizer_files(self) -> dict[str, bytes]:
        """The step's tokenizer files, by their names in that folder.

        Raises ArtifactError for one that the manifest does not list, as a loader would use it."""
        begin = join(TOKENIZER, "")
        listed = (name.removeprefix(begin) for name in self._records if name.startswith(begin))
        found = (name for name in store.list_files(self.tokenizer_url) if not is_hidden(name))
        return {name: self.read_file(begin + name) for name in sorted({*listed, *found})}

    def require_tokenizer(self) -> None:
        """Raise ArtifactError if the step has no tokenizer, or not the published one."""
        if not self.tokenizer_files():
            raise ArtifactError(f"{self.url}: has no tokenizer; its trainer did not save one")

    def read_file(self, name: str) -> bytes:
        """A file of the step; ArtifactError if it differs from the published one."""
        return read_listed(join(self.url, name), self._records.get(name))

    def document(self, name: str) -> dict[str, Any]:
        """A JSON document of the step; ArtifactError for a newer format."""
        document: dict[str, Any] = self._parsed(name)
        check_version(document, join(self.url, name))
        check_depth(document, join(self.url, name))
        return document

    def _parsed(self, name: str) -> Any:
        return parse_json(self.read_file(name), join(self.url, name))

    # --- tensors ----------------------------------------------------------------------------

    def names(self, prefix: str = "") -> list[str]:
        """Global names that start with `prefix`, sorted."""
        return sorted(name for name in self.index if name.startswith(prefix))

    def spec(self, name: str) -> TensorSpec:
        """Type and global shape."""
        entry = self._entry(name)
        return TensorSpec(entry.dtype, entry.shape)

    def locate(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> list[Located]:
        """The pieces that hold parts of a box of a tensor."""
        return locate(self._entry(name), offset, shape)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.index[name]
        except KeyError:
            raise ArtifactError(f"{self.url}: the checkpoint holds no tensor {name!r}") from None

    def close(self) -> None:
        """Close the files; tensors read before stay valid."""
        self.files.close()


def _was_removed(url: str, step_url: str) -> bool:
    """Whether the run has removed the step, which was its latest when it was looked up."""
    return step_url != (url.rstrip("/") or url) and not store.exists(join(step_url, MANIFEST))


def open_step_as(
    opened: Callable[[str, Manifest, Verify], S], url: str, option: str, verify: Verify
) -> S:
    """The step of a step folder, or the latest of a run folder, made by `opened` from its manifest.

    Raises ConfigError, which names `option`, for a missing one, ArtifactError for a damaged one."""
    for looks in count(1):
        step_url, manifest = locate_step(url, option)
        try:
            step = opened(step_url, manifest, verify)
            number = step.step
            break
        except ArtifactError:
            if looks == MOST_LOOKS or not _was_removed(url, step_url):
                raise
            log.info("the run removed %s after saving newer steps; trying again", step_url)
    named = step_of(basename(step_url))
    if named is not None and number != named:
        raise ArtifactError(f"{step_url}: {STATE} says step {number}; the folder was renamed")
    num_tensors = len(step.index)
    log.info("opened checkpoint step=%d tensors=%d url=%s", number, num_tensors, step_url)
    return step


def open_step(url: str, option: str, verify: Verify = "sizes") -> StoredStep[ShardFile]:
    """A step, opened for its bytes, without torch."""

    return open_step_as(partial(StoredStep, open_file=ShardFile), url, option, verify)


def check_step(
    url: str,
    option: str,
    verify: Verify = "sizes",
    also: Callable[[StoredStep[Any]], object] = lambda step: None,
) -> None:
    """Check a step before torch is loaded: its documents against the manifest, and the size of its
    weights. Raises ArtifactError. also: another check of the step."""
    with open_step(url, option, "none" if verify == "none" else "sizes") as step:
        listed = {record.path for record in step.manifest.files}
        weights = {p.file for name in step.names("model.") for p in step.index[name].pieces}
        step.check(apart_from=listed - weights)
        also(step)
