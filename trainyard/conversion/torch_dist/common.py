"""Reads the common state of a `torch_dist` checkpoint of Megatron core: args, iteration, schedules,
and the optimizer's values that are not tensors.

It is in common.pt, a file of torch.save; since core 0.19 in the object `common_state` of a .distcp
file, as a list. If both exist, Megatron core reads common.pt, and so does trainyard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainyard.artifacts.urls import join
from trainyard.checkpoint.closing import Closing
from trainyard.conversion.megatron.folder import ALLOWED
from trainyard.conversion.torch_dist.index import METADATA, Place, StoredIndex
from trainyard.conversion.torch_save.file import TorchFile
from trainyard.conversion.torch_save.pickles import Recorded, TensorRef
from trainyard.errors import ArtifactError

COMMON = "common.pt"

COMMON_OBJECT = "common_state/shard_0_1"


class Common(Closing):
    """The common state, open for reading; close it after its tensors are read.

    has_file: whether the folder has a common.pt. Raises ArtifactError if there is no common state,
    or no args in it."""

    def __init__(self, url: str, has_file: bool, index: StoredIndex) -> None:
        place = None if has_file else _place(url, index)
        self.url = join(url, COMMON if place is None else place[0])
        self._file = TorchFile(self.url, ALLOWED, None if place is None else place[1:])
        try:
            tree = self._file.tree
            if place is not None:
                tree = tree[0] if isinstance(tree, list) and len(tree) == 1 else None
            self.args = _args(tree, self.url)
        except BaseException:
            self.close()
            raise
        self.tree: Mapping[str, Any] = tree

    @property
    def optimizer(self) -> Any:
        """The optimizer's values that are not tensors; of several, such as one of the experts, the
        first one's, which have the same steps and loss scale."""
        found = self.tree.get("optimizer")
        if isinstance(found, Mapping) and found and found.keys() == set(range(len(found))):
            return found[0]
        return found

    def read(self, ref: TensorRef) -> Tensor:
        """The values of a tensor in it."""
        return self._file.read(ref)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _place(url: str, index: StoredIndex) -> Place:
    place = index.objects.get(COMMON_OBJECT)
    if place is None:
        raise ArtifactError(
            f"{url}: has neither {COMMON} nor, in {METADATA}, {COMMON_OBJECT}, which core 0.19 and "
            "later writes instead; the checkpoint is incomplete"
        )
    return place


def _args(tree: Any, url: str) -> Mapping[str, Any]:
    found = tree.get("args") if isinstance(tree, Mapping) else None
    if isinstance(found, Recorded):
        raise ArtifactError(
            f"{url}: its args are refused: it asks for {found.source}, but must be a Namespace; "
            "nothing of it was run"
        )
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{url}: has no args, so the model is not known")
    return found
