"""A file of torch.save that holds a flat dict of tensors: weights by name, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainyard.checkpoint.safetensors.file import DTYPE_NAMES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.torch_save.file import TORCH_DTYPES, TorchFile
from trainyard.conversion.torch_save.pickles import TensorRef
from trainyard.errors import ArtifactError


class TorchWeights:
    """Its tensors; what else the dict holds is left out.

    Raises ArtifactError for a file that is torn, hostile, or of another kind."""

    def __init__(self, url: str) -> None:
        self._file = TorchFile(url)
        try:
            self._refs = _weights(self._file.tree, url)
            for ref in self._refs.values():
                self._file.check(ref)
        except BaseException:
            self.close()
            raise
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(DTYPE_NAMES[TORCH_DTYPES[ref.dtype]], ref.shape)
            for name, ref in self._refs.items()
        }

    def are_one(self, name: str, other: str) -> bool:
        """Whether two names are there and mean the same place in the file."""
        return name in self._refs and self._refs[name] == self._refs.get(other)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._file.read(self._refs[name])

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def _weights(tree: object, url: str) -> dict[str, TensorRef]:
    found = tree if isinstance(tree, dict) else {}
    refs = {str(name): ref for name, ref in found.items() if isinstance(ref, TensorRef)}
    if not refs:
        raise ArtifactError(f"{url}: holds no table of tensors by name")
    for name, ref in refs.items():
        if ref.dtype not in TORCH_DTYPES:
            raise ArtifactError(f"{url}: {name} is of type {ref.dtype}, which is not read")
    return refs
