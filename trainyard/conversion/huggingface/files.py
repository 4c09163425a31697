"""The weight files of a Hugging Face folder, read tensor by tensor.

    model.safetensors, or model-0000k-of-0000N.safetensors with model.safetensors.index.json
    in older folders, files of torch.save: pytorch_model.bin, or shards with their index

Neither indices nor headers are trusted, and files of torch.save, which are pickles, are read
without running what is in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.documents import read_document
from trainyard.conversion.lazy_tensors import TheirTensors
from trainyard.conversion.torch_save.weights import TorchWeights
from trainyard.errors import ArtifactError, ConfigError

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

INDEX_ENDING = ".index.json"

Open = Callable[[str], TheirTensors]


class SafetensorsWeights:
    """All tensors of a safetensors file."""

    def __init__(self, url: str) -> None:
        self._file = TensorFile(url)
        self.specs: Mapping[str, TensorSpec] = {
            name: extent.spec for name, extent in self._file.extents.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._file.read(name)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


WHOLE: dict[str, Open] = {
    "model.safetensors": SafetensorsWeights,
    "pytorch_model.bin": TorchWeights,
}
"""Names of a model in one file, in the order in which they are looked for, and what reads it. The
name of an index is that and `.index.json`."""


class Shards:
    """The tensors of several files."""

    def __init__(self, url: str, names: Iterable[str], open_file: Open) -> None:
        self._files: list[TheirTensors] = []
        self._places: dict[str, TheirTensors] = {}
        try:
            for name in names:
                self._add(open_file(join(url, name)), join(url, name))
        except BaseException:
            self.close()
            raise

    def _add(self, file: TheirTensors, url: str) -> None:
        self._files.append(file)
        for name in file.specs:
            if self._places.setdefault(name, file) is not file:
                raise ArtifactError(f"{url}: tensor {name!r} is in another shard as well")

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape of each tensor, by its name there."""
        return {name: file.specs[name] for name, file in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._places[name].read(name)

    def close(self) -> None:
        """Let the files go."""
        for file in self._files:
            file.close()


def open_weights(url: str) -> TheirTensors:
    """The tensors of a folder, by what is there: one file, or shards with an index."""
    present = store.list_folder(url)
    for name, open_file in WHOLE.items():
        if name in present:
            return open_file(join(url, name))
        if name + INDEX_ENDING in present:
            return _shards(url, name + INDEX_ENDING, open_file)
    raise ConfigError(
        f"{url}: a config.json without weights; wanted {' or '.join(WHOLE)}, or shards with an "
        "index beside them. Download the whole folder"
    )


def _shards(url: str, index: str, open_file: Open) -> Shards:
    mapped = weight_map(url, index)
    files = Shards(url, sorted(set(mapped.values())), open_file)
    missing = sorted(mapped.keys() - files.specs.keys())
    if missing:
        files.close()
        raise ArtifactError(f"{join(url, index)}: {missing[0]} is not in {mapped[missing[0]]}")
    return files


def weight_map(url: str, index: str) -> dict[str, str]:
    """Which file of the folder holds which tensor, by an index."""
    place = join(url, index)
    document: Any = read_document(place)
    mapped = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise ArtifactError(f"{place}: has no weight_map")
    for file in mapped.values():
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
            raise ArtifactError(f"{place}: {file!r:.80} is not a plain name of a file beside it")
    return mapped
