"""Finds and opens the files of a Megatron-LM checkpoint in its `torch` format.

latest_checkpointed_iteration.txt         a number, or `release`
iter_0000100/ or release/                 one iteration
    mp_rank_TT/ or mp_rank_TT_PPP/        tensor rank TT, pipeline rank PPP
    mp_rank_TT_EEE/ or mp_rank_TT_PPP_EEE/    and expert-parallel rank EEE
        model_optim_rng.pt
        distrib_optim.pt                  with the distributed optimizer"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.strict_json import shown
from trainyard.artifacts.urls import basename, join
from trainyard.checkpoint.steps import TRACKER
from trainyard.conversion.megatron.experts import expert_of, with_expert_offset
from trainyard.conversion.megatron.names import (
    REPEATED,
    TIED_COPY,
    family_in,
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
from trainyard.conversion.torch_save.pickles import Recorded, TensorRef
from trainyard.errors import ArtifactError
from trainyard.models.config import ModelType
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.gpt.checkpoint_names import EMBEDDING

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
BACKEND = "metadata.json"
"""File of `torch_dist`, written after everything else in the folder of an iteration."""
RELEASE = "release"

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """The files of one iteration."""

    url: str
    step: int
    """0 for a release."""
    files: tuple[tuple[str, ...], ...]
    """Names relative to the folder of the iteration, by pipeline rank, then by tensor rank; of
    expert-parallel ranks the first."""
    has_distributed_optimizer: bool
    more: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """Those of the other expert-parallel ranks, by pipeline rank, then by tensor rank."""

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.files)

    @property
    def tp(self) -> int:
        """Tensor ranks."""
        return len(self.files[0])

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return 1 + (len(self.more[0][0]) if self.more else 0)

    def with_experts_for_stages(self) -> MegatronFolder:
        """The same files where the second number of a folder is that of an expert-parallel rank:
        the names do not say, but the args do."""
        by_tensor_rank = zip(*self.files[1:], strict=True)
        return replace(self, files=self.files[:1], more=(tuple(by_tensor_rank),))


def rank_folder(tp_rank: int, pp_rank: int, pp: int, ep_rank: int = 0, ep: int = 1) -> str:
    """`mp_rank_01`, with several pipeline ranks `mp_rank_01_000`; with several expert-parallel
    ranks, whose number comes last, `mp_rank_01_000` or `mp_rank_01_000_000`."""
    stage = f"_{pp_rank:03d}" if pp > 1 else ""
    return f"mp_rank_{tp_rank:02d}{stage}" + (f"_{ep_rank:03d}" if ep > 1 else "")


def iteration_folder(step: int) -> str:
    """`iter_0000100`; step 0: `release`."""
    return f"iter_{step:07d}" if step else RELEASE


def marks_of(step: int) -> tuple[str, str]:
    """Files below the root that mark the checkpoint of a step as complete."""
    return TRACKER, f"{iteration_folder(step)}/{BACKEND}"


def find_iteration(url: str) -> tuple[str, int]:
    """Folder and step of the checkpoint at a root with a tracker file, or at the folder of one
    iteration; step 0 is a release. Reads only the tracker."""
    url = url.rstrip("/") or url
    if store.exists(join(url, TRACKER)):
        step, folder = _tracked(join(url, TRACKER))
        return join(url, folder), step
    match = re.fullmatch(r"iter_(\d+)", basename(url))
    return url, int(match[1]) if match else 0


def find_folder(url: str) -> MegatronFolder:
    """The checkpoint at a root with a tracker file, or at the folder of one iteration.

    Raises ArtifactError, which lists the files found, if there is none."""
    return _read(*find_iteration(url))


def _tracked(url: str) -> tuple[int, str]:
    text = store.read_bytes(url)[:100].decode("ascii", "replace").strip()
    if text == RELEASE:
        return 0, RELEASE
    if not text.isdecimal():
        raise ArtifactError(f"{url}: contains {text!r}, wanted a number or `release`")
    return int(text), f"iter_{int(text):07d}"


def _read(url: str, step: int) -> MegatronFolder:
    names = list(store.list_files(url))
    ranks: dict[tuple[int, int, int], str] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        match = RANK_FOLDER.fullmatch(folder)
        if match and file == MODEL_FILE:
            ranks[int(match[2] or 0), int(match[1]), int(match[3] or 0)] = name
    if not ranks:
        found = f"only {', '.join(names[:5])}" if names else "the folder is empty"
        raise ArtifactError(f"{url}: has no mp_rank_XX/{MODEL_FILE}, {found}")
    pp, tp, ep = (1 + max(key[axis] for key in ranks) for axis in (0, 1, 2))
    if max(pp, tp, ep) > 1_000_000 or len(ranks) != pp * tp * ep:
        everyone = product(range(pp), range(tp), range(ep))
        wanted = (key for key in everyone if key not in ranks)
        missing = [rank_folder(t, p, pp, e, ep) for p, t, e in islice(wanted, 5)]
        of_experts = f" x {ep} expert-parallel" if ep > 1 else ""
        raise ArtifactError(
            f"{url}: has {len(ranks)} files for {tp} tensor x {pp} pipeline{of_experts} ranks; "
            f"missing {', '.join(missing)}"
        )
    files = tuple(tuple(ranks[p, t, 0] for t in range(tp)) for p in range(pp))
    more = tuple(
        tuple(tuple(ranks[p, t, e] for e in range(1, ep)) for t in range(tp)) for p in range(pp)
    )
    distributed = any(name.rpartition("/")[2] == OPTIMIZER_FILE for name in names)
    return MegatronFolder(url, step, files, distributed, more if ep > 1 else ())


# --- the file of a rank -----------------------------------------------------------------------


ALLOWED = (ANYTHING,)
"""Classes allowed in files with more than tensors: any. `args`, random states, the loss scaler and
FP8 contain enums, signals, paths and helpers of any release. They are recorded, never imported."""

TENSORS_ALONE = ("megatron.", "fp16.", "apex.", "transformer_engine.")
"""Classes allowed in files that contain only states of the optimizer."""

CHUNK = re.compile(r"model\d{1,9}", re.ASCII)
"""Key of a virtual pipeline stage."""


@dataclass(slots=True)
class Chunk:
    """The model dict of a file, or one of several (virtual pipeline stages). Layers are numbered on
    the stage until `renumber`."""

    parameters: list[Parameter]
    """In the order of the file."""
    unknown: list[str]
    """Paths without a parameter of ours."""
    first_layer: int = 0
    """Layers before this stage, once they are numbered in the whole model."""

    @property
    def num_layers(self) -> int:
        """Layers on the stage."""
        numbers = [layer_of(parameter.name) for parameter in self.parameters]
        return 1 + max((n for n in numbers if n is not None), default=-1)

    def renumber(self, offset: int) -> None:
        """Number layers in the whole model. offset: layers before this stage."""
        self.first_layer = offset
        self._rename(lambda name: with_layer_offset(name, offset))

    def keep_experts(self, offset: int) -> None:
        """Leave out everything but matrices of experts, which other ranks do not have, and number
        them in the whole model. offset: experts before this rank."""
        self.parameters = [p for p in self.parameters if expert_of(p.name) is not None]
        self._rename(lambda name: with_expert_offset(name, offset))

    @property
    def num_experts(self) -> int:
        """Experts of a layer on this rank."""
        numbers = [expert_of(parameter.name) for parameter in self.parameters]
        return 1 + max((n for n in numbers if n is not None), default=-1)

    def _rename(self, rename: Callable[[str], str]) -> None:
        self.parameters = [Parameter(rename(p.name), p.ref, p.is_copy) for p in self.parameters]


class RankFile:
    """`model_optim_rng.pt` of one rank; close it after its tensors are read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.file = TorchFile(url, ALLOWED)
        try:
            if not isinstance(self.file.tree, Mapping):
                raise ArtifactError(f"{url}: is not a dict, so not a checkpoint of Megatron-LM")
            self.tree: Mapping[str, Any] = self.file.tree
            self._check_model()
        except BaseException:
            self.file.close()
            raise

    def _check_model(self) -> None:
        if not any(key == "model" or key == "model0" for key in self.tree):
            names = ", ".join(str(key) for key in list(self.tree)[:8])
            raise ArtifactError(f"{self.url}: has no `model`, only {names}")

    @property
    def args(self) -> Mapping[str, Any] | None:
        """The arguments of the run; None if the file has none, like those of 2019."""
        args = self.tree.get("args")
        self._refuse_recorded("its args", args)
        return args if isinstance(args, Mapping) else None

    @property
    def version(self) -> float:
        """The checkpoint's version, which determines the order of QKV rows; 0 if it has none."""
        version = self.tree.get("checkpoint_version", 0)
        if type(version) not in (int, float) or not 0 <= version <= 3:
            raise ArtifactError(
                f"{self.url}: checkpoint_version must be 0 to 3, got {version!r:.40}"
            )
        return float(version)

    @property
    def iteration(self) -> int | None:
        """The iteration; None if the file has none."""
        return iteration_in(self.tree, self.url)

    def is_legacy(self) -> bool:
        """Whether it is of the legacy model class."""
        return any(is_legacy([path for path, _ in flatten(model)]) for model in self._models())

    def num_chunks(self) -> int:
        """Virtual pipeline stages; a file may omit an empty one at the end."""
        numbers = [int(key[5:]) for key in self.tree if _is_chunk(key)]
        if max(numbers, default=0) > MAX_LAYERS:
            raise ArtifactError(
                f"{self.url}: has a model{max(numbers)}, but at most {MAX_LAYERS} are read"
            )
        return 1 + max(numbers, default=0)

    def _models(self) -> list[Mapping[str, Any]]:
        if "model" in self.tree:
            models = [self.tree["model"]]
        else:
            models = [self.tree.get(f"model{n}", {}) for n in range(self.num_chunks())]
        for model in models:
            self._refuse_recorded("its model", model)
            if not isinstance(model, Mapping):
                raise ArtifactError(f"{self.url}: its model is a {type(model).__name__}")
        return models

    def _refuse_recorded(self, what: str, value: Any) -> None:
        """Refuse an object of an unknown class in a place that is needed."""
        if isinstance(value, Recorded):
            raise ArtifactError(
                f"{self.url}: {what} is refused: it asks for {value.source}, which makes nothing "
                "that this reader knows; nothing of it was run"
            )

    def family(self) -> ModelType:
        """The family of the model; that of a BERT shows on its last stage."""
        return family_in(path for model in self._models() for path, _ in flatten(model))

    def chunks(self, tied: bool, family: ModelType) -> list[Chunk]:
        """The parameters, with layers numbered on the stage."""
        return [self._chunk(model, tied, family) for model in self._models()]

    def _chunk(self, model: Mapping[str, Any], tied: bool, family: ModelType) -> Chunk:
        chunk = Chunk([], [])
        for path, value in flatten(model):
            if is_state_of_engine(path) or value is None:
                continue
            name = our_name(path, tied=tied, family=family)
            if name == REPEATED:
                continue
            self._refuse_recorded(f"{shown(path)} of its model", value)
            if name is None or not isinstance(value, TensorRef):
                chunk.unknown.append(path)
                continue
            self.file.check(value)
            is_copy = name == TIED_COPY
            chunk.parameters.append(Parameter(EMBEDDING if is_copy else name, value, is_copy))
        return chunk


def _is_chunk(key: Any) -> bool:
    return isinstance(key, str) and CHUNK.fullmatch(key) is not None
