"""Plans a `torch_dist` checkpoint: the pieces of its tensors, and its common.pt.

Keys and shapes are Megatron core's (`names`): where layers are alike, all of them in one tensor,
[L, ...], of one piece each. Optimizer states have the shape of their parameter: as in the plain
optimizer (`fp32_param`), or for --use-distributed-optimizer as in its `fully_reshardable` kind
(`param`). Both load under any parallel layout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.megatron.experts import SHARDED, is_of_experts
from trainyard.conversion.megatron.model import CHECKPOINT_VERSION, WholeModel, args_document
from trainyard.conversion.megatron.names import TransformerImpl
from trainyard.conversion.megatron.optimizer import (
    HALF_SPECS,
    MAIN,
    MOMENTS,
    groups_document,
    scaler_document,
    trained_names,
)
from trainyard.conversion.torch_dist.names import places_of
from trainyard.errors import ArtifactError
from trainyard.models.bert import checkpoint_names as bert_names
from trainyard.models.config import ModelType, TransformerConfig
from trainyard.models.gpt.checkpoint_names import (
    EMBEDDING,
    PREDICTION,
    PREDICTION_ATTENTION,
    WITH_EXTRA_STATE,
)
from trainyard.models.mamba import checkpoint_names as mamba_names
from trainyard.models.retro import checkpoint_names as retro_names
from trainyard.models.t5 import checkpoint_names as t5_names
from trainyard.parallel.pipeline.partition import arrange

Shape = tuple[int, ...]

HEADS: dict[ModelType, tuple[str, ...]] = {
    "bert": bert_names.WITH_EXTRA_STATE,
    "t5": t5_names.WITH_EXTRA_STATE,
    "mamba": mamba_names.WITH_EXTRA_STATE,
}
"""Heads with an `_extra_state`."""


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """One of our tensors, or rows of it: a whole tensor of theirs, or one layer of it."""

    key: str
    name: str
    """Our full name: "model.NAME"."""
    spec: TensorSpec
    """Type and shape of the piece, without an axis of layers."""
    begin: int
    """Our row where it begins."""
    layer: int | None
    """Its place in the axis of layers; None: the tensor has none."""
    num_layers: int

    @property
    def global_shape(self) -> Shape:
        """Shape of the tensor of that key."""
        return self.spec.shape if self.layer is None else (self.num_layers, *self.spec.shape)

    @property
    def offset(self) -> Shape:
        """Offset of the piece in that tensor."""
        zeros = (0,) * len(self.spec.shape)
        return zeros if self.layer is None else (self.layer, *zeros)

    @property
    def shape(self) -> Shape:
        """Shape of the piece."""
        return self.spec.shape if self.layer is None else (1, *self.spec.shape)

    @property
    def source_offset(self) -> Shape:
        """Offset of the piece in our tensor."""
        return (self.begin, *(0 for _ in self.spec.shape[1:])) if self.spec.shape else ()


@dataclass(frozen=True, slots=True)
class TorchDistPlan:
    """Everything to write."""

    pieces: tuple[WrittenPiece, ...]
    objects: tuple[str, ...]
    """Names of pickled objects, all empty."""
    common: dict[str, Any]
    """The tree of common.pt, of LazyTensors."""

    @property
    def size_bytes(self) -> int:
        """Total of the tensors."""
        return sum(piece.spec.size_bytes for piece in self.pieces)


def plan_torch_dist(
    model: WholeModel,
    with_optimizer: bool,
    transformer_impl: TransformerImpl = "transformer_engine",
    ep: int = 1,
) -> TorchDistPlan:
    """Plan the files of a model. ep: expert-parallel ranks of the run that loads the optimizer.
    Raises ArtifactError if layers that share a tensor differ in type or shape."""
    names = [n.removeprefix("model.") for n in model.specs if n.startswith("model.")]
    weights = list(_pieces(model, "", "model", names, transformer_impl))
    states = [
        piece
        for kind, source in (_kinds(model) if with_optimizer else ())
        for piece in _pieces(
            model, f"optimizer.state.{kind}.", source, trained_names(model), transformer_impl
        )
    ]
    pieces = [*weights, *states]
    _check_layers(model, pieces)
    return TorchDistPlan(
        tuple(sorted(pieces, key=lambda piece: (piece.key, piece.layer or 0))),
        tuple(_extra_states(weights, model.config)),
        _common(model, with_optimizer, transformer_impl, ep),
    )


def _pieces(
    model: WholeModel, prefix: str, source: str, names: list[str], impl: TransformerImpl
) -> Iterator[WrittenPiece]:
    for name in names:
        full = f"{source}.{name}"
        spec = model.specs[full]
        for place in places_of(name, model.config, impl):
            shape = spec.shape if place.size is None else (place.size, *spec.shape[1:])
            yield WrittenPiece(
                prefix + place.key,
                full,
                TensorSpec(spec.dtype, shape),
                place.begin,
                place.layer,
                model.config.num_layers,
            )


def _extra_states(weights: Iterable[WrittenPiece], config: TransformerConfig) -> list[str]:
    """Names of the pickled objects that Megatron core requires besides tensors: FP8 scales of
    Transformer Engine's modules, which are written empty."""
    single = [*HEADS.get(config.model_type, ())]
    depths = range(config.mtp.mtp_num_layers or 0)
    single += [f"{PREDICTION}{depth}.{PREDICTION_ATTENTION}" for depth in depths]
    found = {f"{module}._extra_state/shard_0_1" for module in single}
    for piece in weights:
        module = mamba_names.part_of(piece.key)[0].rpartition(".")[0]
        if not f".{module}".endswith((*WITH_EXTRA_STATE, *retro_names.WITH_EXTRA_STATE)):
            continue
        layers = [] if piece.layer is None else [(piece.layer, piece.num_layers)]
        experts = piece.spec.shape[0] if SHARDED in piece.key else 1
        for expert in range(experts):
            axes = [*layers, (expert, experts)] if SHARDED in piece.key else layers or [(0, 1)]
            places, sizes = (".".join(map(str, numbers)) for numbers in zip(*axes, strict=True))
            found.add(f"{module}._extra_state/shard_{places}_{sizes}")
    return sorted(found)


def _kinds(model: WholeModel) -> list[tuple[str, str]]:
    """(their kind, beginning of our name); fp32 weights are their own fp32 copies."""
    kinds = [(kind, f"optimizer.{kind}") for kind in MOMENTS]
    if model.specs[f"model.{EMBEDDING}"].dtype in HALF_SPECS:
        kinds.append(("param" if is_distributed(model) else "fp32_param", f"optimizer.{MAIN}"))
    elif is_distributed(model):
        kinds.append(("param", "model"))
    return kinds


def is_distributed(model: WholeModel) -> bool:
    """Whether the run spreads its optimizer over data-parallel ranks, as Megatron-LM's options
    say."""
    return model.options.get("use_distributed_optimizer") is True


def _check_layers(model: WholeModel, pieces: list[WrittenPiece]) -> None:
    layers: dict[str, set[tuple[int | None, TensorSpec]]] = {}
    for piece in pieces:
        layers.setdefault(piece.key, set()).add((piece.layer, piece.spec))
    for key, found in layers.items():
        wanted = model.config.num_layers if {layer for layer, _ in found} != {None} else 1
        if len(found) != wanted or len({spec for _, spec in found}) != 1:
            raise ArtifactError(
                f"{model.url}: {key} must have one type and shape in all "
                f"{model.config.num_layers} layers for torch_dist; keep the checkpoint in our "
                "format (--saver trainyard)"
            )


# --- common.pt ------------------------------------------------------------------------------------


def _common(
    model: WholeModel, with_optimizer: bool, impl: TransformerImpl, ep: int
) -> dict[str, Any]:
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common: dict[str, Any] = {
        "args": Namespace(**_args(model, with_optimizer, impl, ep)),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": model.step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if with_optimizer:
        if is_distributed(model):
            content["distrib_optim_sharding_type"] = "fully_reshardable"
        common["optimizer"] = _optimizer(model, ep)
        if model.scheduler is not None:
            common["opt_param_scheduler"] = dict(model.scheduler)
    return common


def _optimizer(model: WholeModel, ep: int) -> dict[Any, Any]:
    """The optimizer's values that are not tensors. If expert-parallel ranks share the experts,
    these have an optimizer of their own, the second in a table by number."""
    names = trained_names(model)
    dense = [name for name in names if not is_of_experts(name)]
    if ep == 1 or len(dense) == len(names):
        return _one_optimizer(model, groups_document(model, names))
    experts = [name for name in names if is_of_experts(name)]
    both = groups_document(model, dense), groups_document(model, experts, are_experts=True)
    return {number: _one_optimizer(model, groups) for number, groups in enumerate(both)}


def _one_optimizer(model: WholeModel, groups: list[dict[str, Any]]) -> dict[str, Any]:
    scaler = {"grad_scaler": scaler_document(model.scaler)} if model.scaler else {}
    if is_distributed(model):
        kind = {"param_state_sharding_type": "fully_reshardable"}
        return {"optimizer": {"param_groups": groups}, **scaler, **kind}
    inner = {"state": {"common_step": model.num_updates}, "param_groups": groups}
    is_half = model.specs[f"model.{EMBEDDING}"].dtype in HALF_SPECS
    return {"optimizer": inner, **scaler} if is_half else inner


def _args(
    model: WholeModel, with_optimizer: bool, impl: TransformerImpl, ep: int
) -> dict[str, Any]:
    return args_document(
        model,
        tp=1,
        ep=ep,
        split=arrange([model.config.num_layers], pp=1),
        is_legacy=False,
        transformer_impl=impl,
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        use_distributed_optimizer=is_distributed(model),
        no_save_optim=True if not with_optimizer else None,
        no_save_rng=True,
    )
