"""A checkpoint of another program as a training loads it: `--load` of a folder of Megatron-LM, Meta
or Hugging Face, without a conversion before.

Each rank reads whole tensors, one at a time, and keeps its part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard.artifacts.manifest import Manifest
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.detect import loader_for
from trainyard.conversion.loaders import open_source
from trainyard.conversion.same_model import check_same_model
from trainyard.conversion.source import Source
from trainyard.conversion.tokenizer_files import Carried
from trainyard.conversion.vocabulary import Adjusted
from trainyard.conversion.write_native import check_source, config_document, state_document
from trainyard.models.config import TransformerConfig


class LoadableSource(Closing):
    """A source with the interface of a checkpoint (`checkpoint.load.Restorable`)."""

    def __init__(self, source: Source, loader: str) -> None:
        check_source(source)
        self._source = source
        self.url = source.url
        self.manifest = Manifest(stage=loader)
        self.config: dict[str, Any] = config_document(source, loader)
        self.state: dict[str, Any] = state_document(source)
        self.step = source.step

    def names(self, prefix: str = "") -> list[str]:
        """Global names that start with `prefix`, sorted."""
        return sorted(name for name in self._source.specs if name.startswith(prefix))

    def spec(self, name: str) -> TensorSpec:
        """Type and global shape."""
        return self._source.specs[name]

    def fill(self, wanted: Iterable[tuple[str, Sequence[int], Tensor]]) -> int:
        """Read boxes of tensors into existing memory of any type and device; returns the bytes
        read."""
        boxes: dict[str, list[tuple[Sequence[int], Tensor]]] = defaultdict(list)
        for name, offset, target in wanted:
            boxes[name].append((offset, target))
        size = 0
        with torch.no_grad():
            for name in sorted(boxes):
                whole = self._source.read(name)
                size += whole.nbytes
                for offset, target in boxes[name]:
                    box = tuple(slice(o, o + n) for o, n in zip(offset, target.shape, strict=True))
                    target.copy_(whole[box])
        return size

    def close(self) -> None:
        """Close the files."""
        self._source.close()


def open_loadable(
    url: str, model: TransformerConfig, tokenizer: Carried, tensor_parallel_size: int
) -> LoadableSource:
    """The checkpoint of another program at a URL, its vocabulary padded as this run pads it.

    Raises ConfigError if it holds another model, or more tokens than the tokenizer of the run."""
    loader = loader_for(url)
    source = open_source(url, loader)
    try:
        check_same_model(model, source)
        fitted = Adjusted(
            source,
            tokenizer=tokenizer,
            divisible_by=model.make_vocab_size_divisible_by,
            tensor_parallel_size=tensor_parallel_size,
        )
        return LoadableSource(fitted, loader)
    except BaseException:
        source.close()
        raise
