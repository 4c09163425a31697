"""A step at rest: its manifest, its documents, its index, and the files of its tensors as bytes.

Nothing that a step holds is trusted: what is damaged or hostile is an ArtifactError that names the
file, and nothing outside the step folder is read. Tensors: `load`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Generic, TypeVar

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, read_listed
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.strict_json import check_depth, parse_json, shown
from trainyard.artifacts.urls import basename, is_hidden, join
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.index import Entry, Located, check_version, locate, parse_index
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.safetensors.shard import ShardFile
from trainyard.checkpoint.step_shards import ShardFiles, Verify
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

log = logging.getLogger(__name__)

MOST_LOOKS = 5
"""For the latest step of a run that removes steps meanwhile."""

F = TypeVar("F", bound=ShardFiles[Any])
S = TypeVar("S", bound="StoredStep[Any]")


class StoredStep(Closing, Generic[F]):
    """A step that was published. Use as a context manager, or `close` when it is read."""

    def __init__(
        self,
        url: str,
        manifest: Manifest,
        verify: Verify,
        files: Callable[[str, Mapping[str, FileRecord], Mapping[str, Entry], Verify], F],
    ) -> None:
        """files: makes of the records and the index what the tensor files are read with."""
        self.url = url
        self.manifest = manifest
        self.verify = verify
        self._records = {record.path: record for record in manifest.files}
        check_inside(url, self._records)
        self.index: dict[str, Entry] = parse_index(self._parsed(INDEX), join(url, INDEX))
        self.files = files(url, self._records, self.index, verify)

    def check(self, apart_from: Collection[str] = ()) -> None:
        """Everything that the step has, as `verify` says, whether it will be read or not.

        apart_from: files that the caller looks at. Raises ArtifactError for the first file that is
        not as published."""
        if CONFIG in self._records:  # steps of a loop that is not ours may have none
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
        """What the run was at: step, consumed samples, schedule, as its trainer gave them."""
        return self.document(STATE)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model and the run that made it."""
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
        """Of all that the step holds: equal for equal contents, wherever it lies."""
        return self.manifest.output_digest

    @property
    def tokenizer_url(self) -> str:
        """Folder of the tokenizer files that the step carries."""
        return join(self.url, TOKENIZER)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Those files, by their names in that folder.

        Raises ArtifactError for one that the manifest does not list, which a loader would take."""
        begin = join(TOKENIZER, "")
        listed = (name.removeprefix(begin) for name in self._records if name.startswith(begin))
        found = (name for name in store.list_files(self.tokenizer_url) if not is_hidden(name))
        return {name: self.read_file(begin + name) for name in sorted({*listed, *found})}

    def require_tokenizer(self) -> None:
        """Raise ArtifactError where the step carries none, or not the one that was published."""
        if not self.tokenizer_files():
            raise ArtifactError(f"{self.url}: carries no tokenizer; its trainer left it out")

    def read_file(self, name: str) -> bytes:
        """A file of the step, if it is the one that was published; ArtifactError otherwise."""
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
        """Global names that begin with `prefix`, sorted."""
        return sorted(name for name in self.index if name.startswith(prefix))

    def spec(self, name: str) -> TensorSpec:
        """Type and global shape."""
        entry = self._entry(name)
        return TensorSpec(entry.dtype, entry.shape)

    def locate(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> list[Located]:
        """Where the parts of a box of a tensor lie."""
        return locate(self._entry(name), offset, shape)

    def _entry(self, name: str) -> Entry:
        try:
            return self.index[name]
        except KeyError:
            raise ArtifactError(f"{self.url}: the checkpoint holds no tensor {name!r}") from None

    def close(self) -> None:
        """Let the files go; tensors that were read stay."""
        self.files.close()


def _was_removed(url: str, step_url: str) -> bool:
    """Whether the latest step of a run is not there any more: the run goes on, and keeps few."""
    return step_url != (url.rstrip("/") or url) and not store.exists(join(step_url, MANIFEST))


def open_step_as(
    opened: Callable[[str, Manifest, Verify], S], url: str, option: str, verify: Verify
) -> S:
    """The step at a step folder, or the latest of a run folder, as `opened` makes it of its
    manifest.

    Raises ConfigError, naming `option`, when there is none; ArtifactError when it is damaged."""
    for looks in count(1):
        step_url, manifest = locate_step(url, option)
        try:
            step = opened(step_url, manifest, verify)
            number = step.step
            break
        except ArtifactError:
            if looks == MOST_LOOKS or not _was_removed(url, step_url):
                raise
            log.info("step %s was removed meanwhile, as newer ones are there: again", step_url)
    named = step_of(basename(step_url))
    if named is not None and number != named:
        raise ArtifactError(f"{step_url}: {STATE} says step {number}; it was renamed")
    num_tensors = len(step.index)
    log.info("opened checkpoint step=%d tensors=%d url=%s", number, num_tensors, step_url)
    return step


def open_step(url: str, option: str, verify: Verify = "sizes") -> StoredStep[ShardFiles[ShardFile]]:
    """A step, opened for its bytes."""

    def files(
        step_url: str,
        records: Mapping[str, FileRecord],
        index: Mapping[str, Entry],
        verify: Verify,
    ) -> ShardFiles[ShardFile]:
        return ShardFiles(step_url, records, index, verify, ShardFile)

    def opened(
        step_url: str, manifest: Manifest, verify: Verify
    ) -> StoredStep[ShardFiles[ShardFile]]:
        return StoredStep(step_url, manifest, verify, files)

    return open_step_as(opened, url, option, verify)


def check_step(
    url: str,
    option: str,
    verify: Verify = "sizes",
    also: Callable[[StoredStep[Any]], object] = lambda step: None,
) -> None:
    """Refuse, before torch is loaded to read it, a step whose documents are not those of the
    manifest, or whose weights are missing or of another size. also: what else is looked at."""
    with open_step(url, option, "none" if verify == "none" else "sizes") as step:
        listed = {record.path for record in step.manifest.files}
        weights = {p.file for name in step.names("model.") for p in step.index[name].pieces}
        step.check(apart_from=listed - weights)
        also(step)
