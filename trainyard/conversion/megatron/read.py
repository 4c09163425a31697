"""Opens a Megatron-LM checkpoint in `torch` format as a source: both model classes, every version,
any split over tensor, pipeline and virtual pipeline ranks.

`open_megatron` reads the headers of all files and checks that they make up one model. Tensors are
read on request, directly from the files."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard.artifacts.urls import join
from trainyard.checkpoint.bounds import check_model
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.file import DTYPE_NAMES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.megatron.args import config_of
from trainyard.conversion.megatron.experts import stacked_specs, stacks_in
from trainyard.conversion.megatron.folder import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    TENSORS_ALONE,
    Chunk,
    MegatronFolder,
    RankFile,
    find_folder,
)
from trainyard.conversion.megatron.inferred import FACTS, args_of_bare_file, shapes_of
from trainyard.conversion.megatron.layout import (
    cut_of,
    join_parts,
    joined_shape,
    kinds_of_rows,
    rows_by_head,
)
from trainyard.conversion.megatron.optimizer import (
    MOMENTS,
    Parameter,
    States,
    Unknown,
    distributed_states,
    num_updates,
    plain_states,
)
from trainyard.conversion.megatron.progress import (
    Scaler,
    check_iteration,
    samples_in,
    scaler_in,
    schedule_in,
    tokens_of,
    warn_without,
)
from trainyard.conversion.source import model_shapes, refuse_differences
from trainyard.conversion.torch_save.file import TORCH_DTYPES, TorchFile
from trainyard.conversion.torch_save.pickles import TensorRef
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config import ModelType, TransformerConfig
from trainyard.models.gpt.checkpoint_names import EMBEDDING

log = logging.getLogger(__name__)

Part = tuple[TorchFile, TensorRef]
"""A tensor of one rank."""


class MegatronSource(Closing):
    """A `Source`. Use it as a context manager, or `close` it after reading."""

    def __init__(self, folder: MegatronFolder, given: Mapping[str, Any]) -> None:
        """given: arguments of Megatron-LM that replace those in the files."""
        self.folder = folder
        self.url = folder.url
        self._files: list[TorchFile] = []
        self._parts: dict[str, list[Part]] = {}
        self._copy: list[Part] = []
        """Copies of the embedding on the last stage, those of a tensor rank together."""
        try:
            self._open(given)
        except BaseException:
            self.close()
            raise

    def _open(self, given: Mapping[str, Any]) -> None:
        first = self._rank_file(self.folder.files[0][0])
        if _second_number_is_of_experts(self.folder, first.args or {}):
            self.folder = self.folder.with_experts_for_stages()
        ranks = [
            [first if name == self.folder.files[0][0] else self._rank_file(name) for name in row]
            for row in self.folder.files
        ]
        self.is_legacy = first.is_legacy()
        self.version = first.version if self.is_legacy or first.args is None else 3.0
        self.family = _family(ranks)
        self.args = _args(ranks, given, self.family)
        self.config: TransformerConfig = config_of(self.args, first.url)
        check_iteration(self.folder.step, first.iteration, first.url)
        _check_degrees(self.folder, self.args)
        tied = not self.config.untie_embeddings_and_output_weights
        grid = [[rank.chunks(tied, self.family) for rank in row] for row in ranks]
        if self.family != "t5":
            _number_layers(grid, self.config.num_layers, self.url)
        self._collect(ranks, grid)
        self._collect_experts(tied, grid)
        self._stacks = stacks_in(self._parts, self.url)
        self.padded_vocab_size = self._vocabulary()
        self.vocab_size = tokens_of(self.args, self.padded_vocab_size)
        self.step = self.folder.step
        self.consumed_train_samples = samples_in(self.args, first.url)
        self.scheduler = schedule_in(first.tree, first.url)
        """State of the schedules, as in the file, or None."""
        self.specs: dict[str, TensorSpec] = self._model_specs(_unknown(grid))
        self.num_updates = 0
        self.scaler: Scaler = {}
        """State of the loss scale; empty without the optimizer, or if it is constant or unknown."""
        self._add_optimizer(ranks, grid)
        log.info(
            "opened Megatron-LM checkpoint step=%d tp=%d pp=%d class=%s version=%g tensors=%d "
            "pickles read %s url=%s",
            *(self.step, self.folder.tp, self.folder.pp),
            *("legacy" if self.is_legacy else "core", self.version, len(self.specs)),
            *(first.file.network, self.url),
        )

    def _rank_file(self, name: str) -> RankFile:
        rank = RankFile(join(self.url, name))
        self._files.append(rank.file)
        return rank

    # --- the model ------------------------------------------------------------------------

    def _collect(self, ranks: list[list[RankFile]], grid: list[list[list[Chunk]]]) -> None:
        """Find the parts of every parameter, in the order of tensor ranks."""
        parts: dict[str, list[Part]] = defaultdict(list)
        for stage, (row, chunks_of_row) in enumerate(zip(ranks, grid, strict=True)):
            for rank, chunks in zip(row, chunks_of_row, strict=True):
                for parameter in (p for chunk in chunks for p in chunk.parameters):
                    # Multi-token prediction has a copy under the name of the embedding.
                    is_copy = parameter.is_copy or (stage and parameter.name == EMBEDDING)
                    found = self._copy if is_copy else parts[f"model.{parameter.name}"]
                    found.append((rank.file, parameter.ref))
        wrong = [name for name, refs in parts.items() if len(refs) != self.folder.tp]
        if wrong or len(self._copy) not in (0, self.folder.tp, 2 * self.folder.tp):
            raise ArtifactError(
                f"{self.url}: {(wrong or [EMBEDDING])[0]} must be once on each of the "
                f"{self.folder.tp} tensor ranks of one stage, but is not"
            )
        self._parts.update(parts)

    def _collect_experts(self, tied: bool, grid: list[list[list[Chunk]]]) -> None:
        """Find the experts of further expert-parallel ranks, whose layers are those of the first
        rank of their stage."""
        for row, chunks_of_row in zip(self.folder.more, grid, strict=bool(self.folder.more)):
            for names, first in zip(row, chunks_of_row, strict=True):
                for ep_rank, name in enumerate(names, 1):
                    rank = self._rank_file(name)
                    for chunk, beside in zip(rank.chunks(tied, self.family), first, strict=True):
                        chunk.renumber(beside.first_layer)
                        chunk.keep_experts(ep_rank * beside.num_experts)
                        for parameter in chunk.parameters:
                            found = self._parts.setdefault(f"model.{parameter.name}", [])
                            found.append((rank.file, parameter.ref))

    def _vocabulary(self) -> int:
        found = self._parts.get(f"model.{EMBEDDING}")
        if found is None or len(found[0][1].shape) != 2:
            raise ArtifactError(f"{self.url}: no stage has the embedding ({EMBEDDING})")
        return sum(ref.shape[0] for _, ref in found)

    def _model_specs(self, unknown: Sequence[str]) -> dict[str, TensorSpec]:
        """Types and shapes. Raises ArtifactError unless they are those of the model."""
        specs: dict[str, TensorSpec] = {}
        for name, parts in self._parts.items():
            try:
                specs[name] = self._spec(name, parts)
            except ValueError as error:
                raise ArtifactError(f"{self.url}: {name} {error}") from error
        try:
            specs = stacked_specs(specs, self._stacks)
        except ValueError as error:
            raise ArtifactError(f"{self.url}: {error}") from error
        found = {name.removeprefix("model."): spec.shape for name, spec in specs.items()}
        found |= dict.fromkeys(unknown, ())
        check_model(self.config, self.padded_vocab_size, len(found), self.url)
        wanted = model_shapes(self.config, self.padded_vocab_size)
        refuse_differences(found, wanted, self.url, "the model of its args")
        return specs

    def _spec(self, name: str, parts: Sequence[Part]) -> TensorSpec:
        """Type and shape of a whole tensor. Raises ValueError if the parts do not make one."""
        dtypes = {ref.dtype for _, ref in parts}
        if len(dtypes) != 1 or (dtype := dtypes.pop()) not in TORCH_DTYPES:
            raise ValueError("has several types, or an unknown one")
        shape = joined_shape([ref.shape for _, ref in parts], cut_of(name, self.config))
        return TensorSpec(DTYPE_NAMES[TORCH_DTYPES[dtype]], shape)

    # --- the optimizer --------------------------------------------------------------------

    def _add_optimizer(self, ranks: list[list[RankFile]], grid: list[list[list[Chunk]]]) -> None:
        """Add its states, if their parameters can be identified; otherwise log why not."""
        if self.step == 0 or "optimizer" not in ranks[0][0].tree:
            return
        if self.family != "gpt":
            log.warning("the optimizer of %s is left out: only that of a GPT is read", self.url)
            return
        config = self.config
        if config.experts.enabled or config.latent.enabled or config.mtp.mtp_num_layers is not None:
            what = "experts" if config.experts.enabled else "latents or multi-token prediction"
            remedy = "save it there with --ckpt-format torch_dist, of which the optimizer is read"
            log.warning("the optimizer of %s is left out: it has %s; %s", self.url, what, remedy)
            return
        try:
            parts = self._optimizer_parts(ranks, grid)
            specs = {name: self._spec(name, found) for name, found in parts.items()}
            for name, spec in specs.items():
                weight = self.specs["model." + name.split(".", 2)[2]]
                if spec.shape != weight.shape:
                    raise Unknown(
                        f"{name} is {list(spec.shape)}, but its weight is {list(weight.shape)}"
                    )
        except (Unknown, ValueError) as reason:
            log.warning("the optimizer of %s is left out: %s", self.url, reason)
            return
        self._parts |= parts
        self.specs |= specs
        first = ranks[0][0]
        self.num_updates = num_updates(first.tree["optimizer"], first.file.read, self.step)
        self.scaler = _scaler([rank for row in ranks for rank in row])
        warn_without(self.scaler, self.specs[f"model.{EMBEDDING}"].dtype, self.args, self.url)

    def _optimizer_parts(
        self, ranks: list[list[RankFile]], grid: list[list[list[Chunk]]]
    ) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = defaultdict(list)
        for row, chunks_of_row in zip(ranks, grid, strict=True):
            for rank, chunks in zip(row, chunks_of_row, strict=True):
                file, states = self._states(rank, [chunk.parameters for chunk in chunks])
                for kind, refs in states.items():
                    for name, ref in refs.items():
                        file.check(ref)
                        found[f"optimizer.{kind}.{name}"].append((file, ref))
        names = {name.removeprefix("model.") for name in self.specs}
        for kind in MOMENTS:
            if {name for name in names if f"optimizer.{kind}.{name}" not in found}:
                raise Unknown(f"it has {kind} of only some parameters")
        return found

    def _states(self, rank: RankFile, chunks: list[list[Parameter]]) -> tuple[TorchFile, States]:
        if not self.folder.has_distributed_optimizer:
            everything = [parameter for chunk in chunks for parameter in chunk]
            return rank.file, plain_states(rank.tree.get("optimizer"), everything)
        file = TorchFile(rank.url.removesuffix(MODEL_FILE) + OPTIMIZER_FILE, TENSORS_ALONE)
        self._files.append(file)
        return file, distributed_states(file.tree, chunks)

    # --- tensors --------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU, contiguous. Raises ArtifactError if the stages' copies of a
        tied embedding differ."""
        if name in self._stacks:
            return torch.stack([self.read(single) for single in self._stacks[name]])
        parts = [self._rows(name, file.view(ref)) for file, ref in self._parts[name]]
        cut = cut_of(name, self.config)
        if cut == "whole" and any(not torch.equal(parts[0], part) for part in parts[1:]):
            log.warning(
                "%s: %s differs between tensor ranks; using that of rank 0", *(self.url, name)
            )
        if name == f"model.{EMBEDDING}":
            self._check_copy(parts)
        return join_parts(parts, cut)

    def _check_copy(self, parts: Sequence[Tensor]) -> None:
        """Refuse an embedding of which the last stage has another copy."""
        of_rank = len(self._copy) // len(parts)
        copies = (file.view(ref) for file, ref in self._copy)
        originals = (part for part in parts for _ in range(of_rank))
        if not all(map(torch.equal, originals, copies)):
            raise ArtifactError(
                f"{self.url}: the embedding differs between the first and the last stage, which "
                "share it, so it is not known which is right; use another save"
            )

    def _rows(self, name: str, tensor: Tensor) -> Tensor:
        kinds = kinds_of_rows(name)
        if not kinds:
            return tensor
        return rows_by_head(tensor, kinds, self.version, self.config.head_dim)

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Empty: Megatron-LM keeps the tokenizer elsewhere."""
        return {}

    def close(self) -> None:
        """Close the files; tensors read before stay valid."""
        for file in self._files:
            file.close()
        self._files.clear()


def open_megatron(url: str, **given: Any) -> MegatronSource:
    """The checkpoint at a root with latest_checkpointed_iteration.txt, or at iter_XXXXXXX/ or
    release/ in it.

    given: arguments of Megatron-LM, by their names with underscores. Files of 2019, such as
    NVIDIA's GPT-345M, have none and need `num_attention_heads`.
    Raises ArtifactError for damaged files, ConfigError for a model that ours does not compute."""
    return MegatronSource(find_folder(url), given)


# --- values that must be equal in all files -------------------------------------------------------


def _family(ranks: list[list[RankFile]]) -> ModelType:
    """That of the model. Refuses a T5 over pipeline ranks."""
    found = {rank.family() for row in ranks for rank in row}
    family: ModelType = next(iter(found - {"gpt"}), "gpt")
    if family == "t5" and len(ranks) > 1:
        raise ConfigError(
            f"{ranks[0][0].url}: is a T5 over {len(ranks)} pipeline ranks; this version reads only "
            "those with one. Convert it in Megatron-LM to --pipeline-model-parallel-size 1"
        )
    return family


def _args(
    ranks: list[list[RankFile]], given: Mapping[str, Any], family: ModelType
) -> dict[str, Any]:
    """The arguments of rank 0. Refuses ranks of another version, iteration or model class."""
    first = ranks[0][0]
    for rank in (rank for row in ranks for rank in row):
        theirs = (rank.version, rank.iteration, rank.is_legacy(), rank.args is None)
        if theirs != (first.version, first.iteration, first.is_legacy(), first.args is None):
            raise ArtifactError(
                f"{rank.url}: is from another checkpoint than {first.url}: version "
                f"{rank.version:g}, iteration {rank.iteration}, not {first.version:g}, "
                f"{first.iteration}"
            )
    facts = FACTS[family](shapes_of(ranks, family))
    if first.args is None:
        return {**args_of_bare_file(ranks, given, family), **facts}
    options = {key: value for key, value in given.items() if value is not None}
    return {**first.args, **options, **facts}


def _scaler(ranks: Sequence[RankFile]) -> Scaler:
    """The loss scale, which must be the same on all ranks."""
    first, *others = [scaler_in(r.tree.get("optimizer"), r.file.read, r.url) for r in ranks]
    for rank, other in zip(ranks[1:], others, strict=True):
        if other != first:
            raise ArtifactError(
                f"{rank.url}: its loss scale is {other}, but that of {ranks[0].url} is {first}; "
                "the files are from two saves"
            )
    return first


def _second_number_is_of_experts(folder: MegatronFolder, args: Mapping[str, Any]) -> bool:
    """Whether what looks like pipeline ranks are expert-parallel ranks, by the args."""
    stages, experts = (args.get(f"{kind}_model_parallel_size") for kind in ("pipeline", "expert"))
    return folder.ep == 1 and folder.pp > 1 and stages == 1 and experts == folder.pp


def _check_degrees(folder: MegatronFolder, args: Mapping[str, Any]) -> None:
    tp = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
    pp = args.get("pipeline_model_parallel_size")
    for name, stated, found in (("tensor", tp, folder.tp), ("pipeline", pp, folder.pp)):
        if type(stated) is int and stated != found:
            raise ArtifactError(
                f"{folder.url}: has files of {found} {name} ranks, but its args say {stated}; some "
                "files are missing, or left over from another run"
            )


def _number_layers(grid: list[list[list[Chunk]]], num_layers: int, url: str) -> None:
    """Number layers over stages: chunk v of pipeline rank p comes after chunk v of rank p - 1."""
    num_chunks = max(len(chunks) for row in grid for chunks in row)
    offset = 0
    for number in range(num_chunks):
        for row in grid:
            stage = [chunks[number] for chunks in row if number < len(chunks)]
            counts = {chunk.num_layers for chunk in stage}
            if len(counts) > 1 or len(stage) not in (0, len(row)):
                raise ArtifactError(f"{url}: tensor ranks of one stage have different layers")
            for chunk in stage:
                chunk.renumber(offset)
            offset += counts.pop() if counts else 0
    if offset != num_layers:
        raise ArtifactError(
            f"{url}: its stages have {offset} layers, but its args say {num_layers}"
        )


def _unknown(grid: list[list[list[Chunk]]]) -> list[str]:
    return [path for row in grid for chunks in row for chunk in chunks for path in chunk.unknown]
