"""Writes a Megatron-LM checkpoint in `torch` format, for either model class and any number of
tensor, pipeline and virtual pipeline ranks.

Checkpoint version 3. Includes the states of Adam, in the layout of the plain optimizer, if the
source has them and its options. It has no states of random generators, which trainyard's runs lack:
start Megatron-LM with --no-load-rng. The files of the tensor ranks are written side by side, so
that each tensor is read once for all of them; one tensor, and its part for one rank, is in
memory."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.reshard import OpenFile
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.steps import TRACKER
from trainyard.conversion.megatron.experts import (
    check_expert_ranks,
    expert_of,
    grouped_name,
    with_expert_offset,
    with_single_experts,
)
from trainyard.conversion.megatron.folder import (
    MODEL_FILE,
    RELEASE,
    iteration_folder,
    rank_folder,
)
from trainyard.conversion.megatron.lacking import (
    refuse_for_legacy,
    refuse_for_megatron,
    warn_of_norm,
)
from trainyard.conversion.megatron.layout import Boxes, boxes_of_rank, cut_of
from trainyard.conversion.megatron.model import (
    CHECKPOINT_VERSION,
    ReadSlice,
    WholeModel,
    args_document,
    box_of,
    whole_model,
)
from trainyard.conversion.megatron.names import (
    LEGACY_COPY,
    ModelClass,
    TransformerImpl,
    has_tied_copy,
    is_in_mixture,
    layer_of,
    nested,
    registration_order,
    repeated_names,
    style_of,
    their_name,
    with_layer_offset,
)
from trainyard.conversion.megatron.optimizer import (
    Written,
    has_optimizer,
    optimizer_document,
)
from trainyard.conversion.source import Source
from trainyard.conversion.torch_save.write import LazyTensor, lazy_tensors, writing_torch_file
from trainyard.errors import ConfigError
from trainyard.models.gpt.checkpoint_names import EMBEDDING, OUTPUT
from trainyard.parallel.pipeline.partition import Partition, arrange, nearest, stages_in_order

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The layout to write."""

    model_class: ModelClass
    style: str
    """The names and order of modules: legacy, local or transformer_engine."""
    tp: int
    split: Partition
    """Layers of each pipeline rank."""
    ep: int = 1
    """Ranks that share the experts."""

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.split)

    @property
    def vpp(self) -> int:
        """Stages of each pipeline rank; 1 without virtual stages."""
        return len(self.split[0])


def write_megatron(
    source: Checkpoint | Source,
    open_file: OpenFile,
    *,
    model_class: ModelClass = "core",
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    split: Partition | None = None,
    transformer_impl: TransformerImpl | None = None,
    true_vocab_size: int | None = None,
    make_vocab_size_divisible_by: int | None = None,
    save_optimizer: bool = True,
    advance: Callable[[int], object] = lambda size_bytes: None,
    expect: Callable[[int], object] = lambda size_bytes: None,
) -> None:
    """Write a step, or a release if the source has no step; the tracker file last.

    open_file: opens a file by its name below the folder for Megatron-LM's --load.
    pp, vpp: pipeline ranks and virtual stages of each, all with the same number of layers.
    split: the layers of each stage, instead of pp and vpp.
    ep: ranks that share the experts; of a model with experts the weights alone are written.
    transformer_impl: whose names core files have; None: Transformer Engine's, as in Megatron-LM.
    true_vocab_size: tokens of the tokenizer, to pad the vocabulary again for `tp` ranks.
    expect: called before the first file with the total bytes that `advance` will report.
    Raises ConfigError, before anything is written, for degrees that do not fit the model, or a
    model that the class does not compute."""
    if min(tp, pp, vpp, ep) < 1:
        raise ConfigError("the target parallel sizes must be at least 1")
    model = whole_model(source, tp, true_vocab_size, make_vocab_size_divisible_by)
    check_expert_ranks(model.config, ep)
    model = with_single_experts(model)
    stages = split or _even_split(model.config.num_layers, pp, vpp)
    target = TargetLayout(model_class, style_of(model_class, transformer_impl), tp, stages, ep)
    _check(model, target)
    warn_of_norm(model.config)
    with_optimizer = save_optimizer and has_optimizer(model)
    if with_optimizer:
        _warn_of_groups(model, target)
    parts = {
        (pp_rank, ep_rank): _RankWriter(model, target, pp_rank, 0, ep_rank, advance)
        for pp_rank, ep_rank in product(range(target.pp), range(ep))
    }
    expect(sum(tp * first.size_bytes(with_optimizer) for first in parts.values()))
    for pp_rank, ep_rank in parts:
        _write_side_by_side(model, target, pp_rank, ep_rank, with_optimizer, open_file, advance)
    with open_file(TRACKER) as out:
        out.write((str(model.step) if model.step else RELEASE).encode())


def _write_side_by_side(
    model: WholeModel,
    target: TargetLayout,
    pp_rank: int,
    ep_rank: int,
    with_optimizer: bool,
    open_file: OpenFile,
    advance: Callable[[int], object],
) -> None:
    """Write the files of the tensor ranks of one place, whose tensors have the same order."""
    model = replace(model, read_slice=_read_once(model))
    with ExitStack() as stack:
        files = []
        for tp_rank in range(target.tp):
            of_rank = rank_folder(tp_rank, pp_rank, target.pp, ep_rank, target.ep)
            name = f"{iteration_folder(model.step)}/{of_rank}/{MODEL_FILE}"
            out = stack.enter_context(open_file(name))
            writer = _RankWriter(model, target, pp_rank, tp_rank, ep_rank, advance)
            tree = writer.tree(with_optimizer)
            file = writing_torch_file(out, tree, MODEL_FILE.removesuffix(".pt"))
            files.append(stack.enter_context(closing(file)))  # before `out` is given up
        for _ in zip_longest(*files):
            pass


def _read_once(model: WholeModel) -> ReadSlice:
    """Reads a tensor whole, and keeps it until another one is read."""
    last: dict[str, Tensor] = {}

    def read_slice(name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        if name not in last:
            last.clear()  # before the next one is read
            shape = model.specs[name].shape
            last[name] = model.read_slice(name, (0,) * len(shape), shape)
        return box_of(last[name], offset, extent)

    return read_slice


def _even_split(num_layers: int, pp: int, vpp: int) -> Partition:
    """The same number of layers on every stage."""
    stages = pp * vpp
    if num_layers % stages:
        raise ConfigError(f"{num_layers} layers must be divisible by {stages} pipeline stages")
    return arrange([num_layers // stages] * stages, pp)


def _check(model: WholeModel, target: TargetLayout) -> None:
    config = model.config
    refuse_for_megatron(config, target.pp)
    if target.vpp > 1 and target.pp < 2:
        raise ConfigError("virtual pipeline stages need a pipeline-parallel size of at least 2")
    if config.query_groups % target.tp:
        raise ConfigError(
            f"{config.query_groups} key and value heads must be divisible by --target-tensor-"
            f"parallel-size {target.tp}; "
            f"{nearest('--target-tensor-parallel-size', config.query_groups, target.tp)}"
        )
    if target.style == "local" and config.model_type == "mamba":
        raise ConfigError(
            "Megatron-LM's hybrids have no layers with --transformer-impl local; leave "
            "--saver-transformer-impl out"
        )
    if target.model_class == "legacy":
        refuse_for_legacy(config)
        if len({len(stage.layers) for stage in stages_in_order(target.split)}) > 1:
            raise ConfigError(
                "the legacy model class of Megatron-LM has the same number of layers on every "
                "pipeline stage; use --saver core, or give all stages the same number"
            )
    for name in model.specs:
        if name.startswith("model."):
            try:
                boxes_of_rank(model.specs[name].shape, cut_of(name, config), 0, target.tp)
            except ValueError as error:
                raise ConfigError(
                    f"--target-tensor-parallel-size {target.tp}: {name} {error}"
                ) from error


def _warn_of_groups(model: WholeModel, target: TargetLayout) -> None:
    """Warn about releases with another order of groups, as Megatron-LM finds them by position."""
    if model.options.get("decoupled_lr") is not None:
        releases = "0.7 to 0.13, and with two pipeline ranks at most to 0.15"
    elif target.style == "local" and target.pp > 1:
        releases = "0.16 and later"
    else:
        return
    log.warning(
        "the groups of the optimizer are written in the order of Megatron core %s; other releases "
        "refuse or confuse them: use --no-load-optim there, or --saver torch_dist for any release",
        releases,
    )


class _RankWriter:
    """Makes the tree of one rank's file."""

    def __init__(
        self,
        model: WholeModel,
        target: TargetLayout,
        pp_rank: int,
        tp_rank: int,
        ep_rank: int,
        advance: Callable[[int], object],
    ) -> None:
        self._model, self._target = model, target
        self._pp_rank, self._tp_rank, self._advance = pp_rank, tp_rank, advance
        size = (model.config.experts.num_experts or 0) // target.ep
        self._experts = range(ep_rank * size, (ep_rank + 1) * size)

    def tree(self, with_optimizer: bool) -> dict[str, Any]:
        """What `torch.load` will return, with tensors that are made when they are written."""
        model, target = self._model, self._target
        chunks = [self._chunk(number) for number in range(target.vpp)]
        tree: dict[str, Any] = {
            "args": Namespace(**self._args()),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": model.step,
        }
        for number, written in enumerate(chunks):
            key = "model" if target.vpp == 1 else f"model{number}"
            flat = {item.path: self._lazy(f"model.{item.name}") for item in written}
            tree[key] = nested(flat, target.style)
        if with_optimizer:
            everything = [item for written in chunks for item in written]
            in_order = target.model_class == "legacy"
            tree["optimizer"] = optimizer_document(model, everything, self._lazy, in_order)
            if model.scheduler is not None:
                tree["opt_param_scheduler"] = dict(model.scheduler)
        return tree

    def size_bytes(self, with_optimizer: bool) -> int:
        """Bytes of the tensors of the file."""
        return sum(lazy.spec.size_bytes for lazy in lazy_tensors(self.tree(with_optimizer)))

    def _args(self) -> dict[str, Any]:
        target = self._target
        return args_document(
            self._model,
            tp=target.tp,
            ep=target.ep,
            split=target.split,
            is_legacy=target.model_class == "legacy",
            transformer_impl="local" if target.style == "legacy" else target.style,
        )

    def _chunk(self, number: int) -> list[Written]:
        """The parameters of a stage in the order of Megatron's modules."""
        model, target = self._model, self._target
        stage = target.split[self._pp_rank][number]
        layers, is_last = stage.layers, stage.has_output
        local = {}
        for full in model.specs:
            kind, _, name = full.partition(".")
            layer = layer_of(name)
            if kind != "model" or expert_of(name) not in (None, *self._experts):
                continue
            here = (
                layer in layers
                if layer is not None
                else _is_here(name, stage.has_embedding, is_last)
            )
            if here:
                short = with_layer_offset(name, -layers.start)
                local[with_expert_offset(short, -self._experts.start)] = name
        family = model.config.model_type
        written = [
            Written(path, local[short])
            for short in registration_order(list(local), target.style)
            for path in (
                self._path(short, local[short]),
                *repeated_names(short, target.style, family),
            )
        ]
        if is_last and has_tied_copy(model.config, target.pp):
            path = LEGACY_COPY if target.style == "legacy" else OUTPUT
            written.append(Written(path, EMBEDDING))
        if is_last and not stage.has_embedding and model.config.mtp.mtp_num_layers is not None:
            written.append(Written(EMBEDDING, EMBEDDING))  # a copy, for the tokens of each depth
        return written

    def _path(self, short: str, name: str) -> str:
        """The path of a parameter; short: its name as numbered on this rank."""
        target, config = self._target, self._model.config
        path = their_name(
            short,
            target.style,
            config.model_type,
            in_mixture=is_in_mixture(name, config),
            latents=config.latent.enabled,
        )
        # Megatron-LM's hybrids have no other experts.
        is_grouped = config.experts.moe_grouped_gemm or config.model_type == "mamba"
        return grouped_name(path) if is_grouped and target.style == "transformer_engine" else path

    def _lazy(self, name: str) -> LazyTensor:
        model, target = self._model, self._target
        cut = cut_of(name, model.config)
        boxes = boxes_of_rank(model.specs[name].shape, cut, self._tp_rank, target.tp)
        spec = TensorSpec(model.specs[name].dtype, boxes.shape)

        def make() -> Tensor:
            self._advance(spec.size_bytes)
            return _read_boxes(model, name, boxes)

        return LazyTensor(spec, make)


def _is_here(name: str, is_first: bool, is_last: bool) -> bool:
    return is_first if name.startswith("embedding.") else is_last


def _read_boxes(model: WholeModel, name: str, boxes: Boxes) -> Tensor:
    found: Sequence[Tensor] = [
        model.read_slice(name, offset, extent)
        for offset, extent in zip(boxes.offsets, boxes.extents, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(list(found))
