"""One file of a Megatron-LM checkpoint: the parameters of one tensor and one pipeline rank, by
our names, and what else it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.strict_json import shown
from trainyard.conversion.megatron.names import (
    TIED_COPY,
    flatten,
    is_legacy,
    is_state_of_engine,
    layer_of,
    our_name,
    with_layer_offset,
)
from trainyard.conversion.megatron.optimizer import Parameter
from trainyard.conversion.megatron.progress import iteration_in
from trainyard.conversion.torch_save.file import TorchFile
from trainyard.conversion.torch_save.pickle_names import ANYTHING
from trainyard.conversion.torch_save.pickles import Noted, TensorRef
from trainyard.errors import ArtifactError
from trainyard.models.config import MAX_LAYERS
from trainyard.models.gpt.checkpoint_names import EMBEDDING

ALLOWED = (ANYTHING,)
"""Of the files that hold more than tensors: `args`, states of random generators, the scaler of the
loss and FP8 keep enums, signals, paths and helpers of any release. They are noted, and only what is
needed must be known."""

TENSORS_ALONE = ("megatron.", "fp16.", "apex.", "transformer_engine.")
"""Of the files that hold states of the optimizer and nothing else."""

CHUNK = re.compile(r"model\d{1,9}", re.ASCII)
"""Key of a virtual pipeline stage."""


@dataclass(slots=True)
class Chunk:
    """The model dict of a file, or one of several (virtual pipeline stages); layers are counted on
    the stage until `renumber`."""

    parameters: list[Parameter]
    """In the order of the file."""
    unknown: list[str]
    """Paths that no parameter of ours has."""

    @property
    def num_layers(self) -> int:
        """Layers on the stage."""
        numbers = [layer_of(parameter.name) for parameter in self.parameters]
        return 1 + max((n for n in numbers if n is not None), default=-1)

    def renumber(self, offset: int) -> None:
        """Count layers from the first of the whole model."""
        self.parameters = [
            Parameter(with_layer_offset(p.name, offset), p.ref, p.is_copy) for p in self.parameters
        ]


class RankFile:
    """`model_optim_rng.pt` of one rank; close it when its tensors are read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.file = TorchFile(url, ALLOWED)
        try:
            if not isinstance(self.file.tree, Mapping):
                raise ArtifactError(f"{url}: holds no dict, so no checkpoint of Megatron-LM")
            self.tree: Mapping[str, Any] = self.file.tree
            self._check_model()
        except BaseException:
            self.file.close()
            raise

    def _check_model(self) -> None:
        if not any(key == "model" or key == "model0" for key in self.tree):
            names = ", ".join(str(key) for key in list(self.tree)[:8])
            raise ArtifactError(f"{self.url}: holds no `model`, only {names}")

    @property
    def args(self) -> Mapping[str, Any] | None:
        """The arguments of the run; None where the file has none, as of 2019."""
        args = self.tree.get("args")
        self._refuse_note("its args", args)
        return args if isinstance(args, Mapping) else None

    @property
    def version(self) -> float:
        """Of the checkpoint: the order of QKV rows; 0 where the file does not say."""
        version = self.tree.get("checkpoint_version", 0)
        if type(version) not in (int, float) or not 0 <= version <= 3:
            raise ArtifactError(f"{self.url}: checkpoint_version {version!r:.40}; 0 to 3 are known")
        return float(version)

    @property
    def iteration(self) -> int | None:
        """Of the run; None where the file does not say."""
        return iteration_in(self.tree, self.url)

    def is_legacy(self) -> bool:
        """Whether it is of the legacy model class."""
        return any(is_legacy([path for path, _ in flatten(model)]) for model in self._models())

    def num_chunks(self) -> int:
        """Virtual pipeline stages; an empty one at the end may be left out of a file."""
        numbers = [int(key[5:]) for key in self.tree if _is_chunk(key)]
        if max(numbers, default=0) > MAX_LAYERS:
            raise ArtifactError(f"{self.url}: holds a model{max(numbers)}; no run has so many")
        return 1 + max(numbers, default=0)

    def _models(self) -> list[Mapping[str, Any]]:
        if "model" in self.tree:
            models = [self.tree["model"]]
        else:
            models = [self.tree.get(f"model{n}", {}) for n in range(self.num_chunks())]
        for model in models:
            self._refuse_note("its model", model)
            if not isinstance(model, Mapping):
                raise ArtifactError(f"{self.url}: its model is a {type(model).__name__}")
        return models

    def _refuse_note(self, what: str, value: Any) -> None:
        """What is needed must be made by what is known."""
        if isinstance(value, Noted):
            raise ArtifactError(
                f"{self.url}: {what} is refused: it asks for {value.source}, which makes nothing "
                "that this reader knows; nothing of it was run"
            )

    def chunks(self, tied: bool) -> list[Chunk]:
        """The parameters, layers counted on the stage."""
        return [self._chunk(model, tied) for model in self._models()]

    def _chunk(self, model: Mapping[str, Any], tied: bool) -> Chunk:
        chunk = Chunk([], [])
        for path, value in flatten(model):
            if is_state_of_engine(path) or value is None:
                continue
            name = our_name(path, tied=tied)
            self._refuse_note(f"{shown(path)} of its model", value)
            if name is None or not isinstance(value, TensorRef):
                chunk.unknown.append(path)
                continue
            self.file.check(value)
            is_copy = name == TIED_COPY
            chunk.parameters.append(Parameter(EMBEDDING if is_copy else name, value, is_copy))
        return chunk


def _is_chunk(key: Any) -> bool:
    return isinstance(key, str) and CHUNK.fullmatch(key) is not None
