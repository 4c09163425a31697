"""Reads a step whose tensor files are in the folders of several nodes.

Ranks of the nodes that have a file read it, and send its header and data to the others (see
`shared_load`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.distributed import ProcessGroup

from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.header import Extent
from trainyard.checkpoint.stored_step import ShardFiles, Verify
from trainyard.errors import ArtifactError
from trainyard.parallel.groups import gather_or_raise


class DistantFile(TensorFile):
    """A file on another node, of which this rank knows only the header."""

    def __init__(self, url: str, extents: Mapping[str, Extent]) -> None:
        """Opens nothing."""
        self.url = url
        self.extents, self.metadata = dict(extents), {}

    @property
    def is_local(self) -> bool:
        """True for the ranks that read it."""
        return True

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Never called: the plan assigns its reads to other ranks."""
        raise ArtifactError(f"{self.url}: is on another node and cannot be read from here")

    def check_unchanged(self) -> None:
        """Its readers check it."""


class ScatteredFiles(ShardFiles[TensorFile]):
    """The tensor files of a step, which the ranks that see them compared with the manifest."""

    def bind(self, readers: Mapping[str, Sequence[int]], rank: int, group: ProcessGroup) -> None:
        """readers: for each file that not every rank sees, the ranks that do. group: all ranks;
        this one is `rank`."""
        self.readers = readers
        self._rank, self._group = rank, group

    def open_unchecked(self, names: Iterable[str]) -> dict[str, TensorFile]:
        """Called by all ranks together."""
        asked = sorted(set(names))
        near = [n for n in asked if n not in self.readers or self._rank in self.readers[n]]
        sends = [n for n in near if self._rank == min(self.readers.get(n, (-1,)))]

        def open_near() -> dict[str, TensorFile]:
            return super(ScatteredFiles, self).open_unchecked(near)

        opened = gather_or_raise(open_near, self._group, give=False)[self._rank]
        headers = gather_or_raise(lambda: {n: opened[n].extents for n in sends}, self._group)
        extents = {name: found for of_rank in headers for name, found in of_rank.items()}
        distant = {n: DistantFile(join(self._url, n), extents[n]) for n in asked if n not in opened}
        return {name: opened[name] if name in opened else distant[name] for name in asked}

    def unchecked(self, names: Iterable[str]) -> list[str]:
        """None: the ranks that see the files compared digests before the step was chosen."""
        return []


def open_scattered(
    url: str,
    readers: Mapping[str, Sequence[int]],
    verify: Verify,
    rank: int,
    group: ProcessGroup | None,
) -> Checkpoint:
    """The checkpoint of a step folder with all documents and the tensor files of this node.

    All ranks open it, and load from it together."""
    checkpoint = open_checkpoint(url, "--save", verify)
    if readers:
        assert group is not None, f"{join(url, MANIFEST)}: one rank, and files that it does not see"
        records = {record.path: record for record in checkpoint.manifest.files}
        files = ScatteredFiles(url, records, checkpoint.index, verify, TensorFile)
        files.bind(readers, rank, group)
        checkpoint.files = files
    return checkpoint
