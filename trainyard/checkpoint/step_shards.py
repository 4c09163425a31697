"""The tensor files of a step: opened when they are needed, and held against manifest and index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.index import Entry
from trainyard.checkpoint.plan import KINDS
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.safetensors.shard import ShardFile
from trainyard.checkpoint.safetensors.threads import LOCAL_THREADS, REMOTE_THREADS, in_order
from trainyard.checkpoint.steps import INDEX
from trainyard.errors import ArtifactError

F = TypeVar("F", bound=ShardFile)

Verify: TypeAlias = Literal["none", "sizes", "digests"]
"""What is compared with the manifest before values are used: nothing but what must hold for a file
to be read at all; the size of each tensor file that is read; or the digest of each of them, for
which all of it is read once more. Documents are compared by size and digest at every level."""


class ShardFiles(Generic[F]):
    """Of one step, whose index says what they hold. Thread-safe only in what `ShardFile` is."""

    def __init__(
        self,
        url: str,
        records: Mapping[str, FileRecord],
        index: Mapping[str, Entry],
        verify: Verify,
        open_file: Callable[[str, int | None], F],
    ) -> None:
        """open_file: opens one at a URL that must have so many bytes.

        Raises ArtifactError for an index that does not go with the manifest's `records`."""
        self._open_file = open_file
        self._url, self._records, self._verify = url, records, verify
        self._specs: dict[str, set[tuple[str, TensorSpec]]] = defaultdict(set)
        self._open: dict[str, F] = {}
        self._checked: set[str] = set()
        self.readers: Mapping[str, Sequence[int]] = {}
        """Of files that not every rank sees, the ranks that do."""
        for name, entry in index.items():
            if name.partition(".")[0] not in KINDS:
                raise ArtifactError(
                    f"{join(url, INDEX)}: tensor {name!r} is none of {', '.join(KINDS)}"
                )
            for piece in entry.pieces:
                self._specs[piece.file].add((piece.key, TensorSpec(entry.dtype, piece.shape)))
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
        """Files by name, checked as the step is to be."""
        files = self.open_unchecked(names)
        self.check(self.unchecked(files))
        return files

    def open_unchecked(self, names: Iterable[str]) -> dict[str, F]:
        """Files by name, of which the digest may not have been compared yet."""
        asked = sorted(set(names))
        new = [name for name in asked if name not in self._open]
        # Requests for headers of remote files wait for each other otherwise.
        for name, file in zip(new, in_order(self._opened, new, REMOTE_THREADS), strict=True):
            self._open[name] = file
        return {name: self._open[name] for name in asked}

    def _opened(self, name: str) -> F:
        record = self._records[name]
        size = None if self._verify == "none" else record.size_bytes
        file = self._open_file(join(self._url, name), size)
        try:
            _check_contents(file, self._specs[name])
        except BaseException:
            file.close()
            raise
        return file

    def unchecked(self, names: Iterable[str]) -> list[str]:
        """Those whose digest is to be compared before their values are used, sorted."""
        return sorted(set(names) - self._checked) if self._verify == "digests" else []

    def check(self, names: Sequence[str]) -> None:
        """Read all of some files that are open; ArtifactError for one that is not as published."""
        files = [self._open[name] for name in names]
        digests = in_order(ShardFile.digest, files, LOCAL_THREADS)
        for name, digest in zip(names, digests, strict=True):
            check_digest(join(self._url, name), self._records.get(name), digest)
        self.mark_checked(names)

    def mark_checked(self, names: Iterable[str]) -> None:
        """Somebody compared the digests of these."""
        self._checked.update(names)

    def close(self) -> None:
        """Let the files go."""
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
