"""The tensor files of a step, opened for their tensors."""

from __future__ import annotations

from collections.abc import Mapping

from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.index import Entry
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.step_shards import ShardFiles, Verify

__all__ = ["StepFiles", "Verify"]


class StepFiles(ShardFiles[TensorFile]):
    """Of one step, whose index says what they hold."""

    def __init__(
        self,
        url: str,
        records: Mapping[str, FileRecord],
        index: Mapping[str, Entry],
        verify: Verify,
    ) -> None:
        """Raises ArtifactError for an index that does not go with the manifest's `records`."""
        super().__init__(url, records, index, verify, TensorFile)
