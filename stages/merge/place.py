"""Where shares of a merge make the .bin, and in which units: a file, or an upload of parts."""

from __future__ import annotations

from dataclasses import dataclass

from stages.merge.config import MergeConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import shared_file, shared_upload
from trainyard.artifacts.digest import SHORT, digest_document
from trainyard.artifacts.output import Output
from trainyard.artifacts.shared_file import SharedFile
from trainyard.artifacts.shared_upload import SharedUpload
from trainyard.artifacts.urls import is_local
from trainyard.corpus import merged_blocks
from trainyard.corpus.merged_blocks import MergedTokens


@dataclass(frozen=True, slots=True)
class Place:
    """Where the .bin is made: on a file system, or in an object store."""

    folder_url: str
    bin_url: str
    """Its final name."""
    size_bytes: int
    key: str
    """Of the file that these inputs, options and code make."""

    @property
    def unit(self) -> int:
        """Blocks that one share makes together."""
        return 1 if is_local(self.bin_url) else self._part_bytes // merged_blocks.BLOCK_BYTES

    @property
    def _part_bytes(self) -> int:
        return shared_upload.part_bytes(self.size_bytes, merged_blocks.BLOCK_BYTES)

    @property
    def num_parts(self) -> int:
        """Of the upload; 0 of a file."""
        return 0 if is_local(self.bin_url) else -(-self.size_bytes // self._part_bytes)

    def join_in(self) -> SharedFile | SharedUpload:
        """The file that is being made, begun if there is none."""
        if is_local(self.bin_url):
            return shared_file.join_in(self.folder_url, self.key, self.size_bytes)
        upload = (self.bin_url, self.size_bytes, self._part_bytes)
        return shared_upload.join_in(self.folder_url, self.key, *upload)

    def file(self, file_id: str) -> SharedFile | SharedUpload:
        """The file of that id."""
        if is_local(self.bin_url):
            return SharedFile(self.folder_url, self.key, file_id)
        return SharedUpload(self.bin_url, file_id, self.size_bytes, self._part_bytes)


def place_of(config: MergeConfig, stage: StageRun, merged: MergedTokens) -> Place:
    """Where all shares of this run, and the join, make the .bin."""
    key = digest_document([stage.shares_lineage or stage.lineage, stage.code])[:SHORT]
    bin_url = Output.prefix(config.output_prefix).file_url(".bin")
    return Place(config.shares_url, bin_url, merged.size_bytes, key)
