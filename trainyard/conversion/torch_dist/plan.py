"""Plans a `torch_dist` checkpoint: the pieces of its tensors, and its common.pt.

Keys and shapes are Megatron core's for a homogeneous GPT: all layers in one tensor, [L, ...], one
piece each. Optimizer states have the shape of their parameter: as in the plain optimizer
(`fp32_param`), or for --use-distributed-optimizer as in its `fully_reshardable` kind (`param`).
Both load under any parallel layout."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.megatron.model import CHECKPOINT_VERSION, WholeModel, args_document
from trainyard.conversion.megatron.optimizer import (
    HALF_SPECS,
    MAIN,
    MOMENTS,
    groups_document,
    scaler_document,
)
from trainyard.conversion.torch_dist.names import extra_states, stacked_key
from trainyard.errors import ArtifactError
from trainyard.models.gpt.checkpoint_names import EMBEDDING
from trainyard.parallel.pipeline.partition import arrange

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """One of our tensors: a whole tensor of theirs, or one layer of it."""

    key: str
    name: str
    """Our full name: "model.NAME"."""
    spec: TensorSpec
    """Type and shape of our tensor."""
    layer: int | None
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


def plan_torch_dist(model: WholeModel, with_optimizer: bool) -> TorchDistPlan:
    """Plan the files of a model. Raises ArtifactError if its layers differ in type or shape."""
    names = [n.removeprefix("model.") for n in model.specs if n.startswith("model.")]
    pieces = [_piece(model, "", f"model.{name}", name) for name in names]
    if with_optimizer:
        for kind, source in _kinds(model):
            prefix = f"optimizer.state.{kind}."
            pieces += [_piece(model, prefix, f"{source}.{name}", name) for name in names]
    _check_layers(model, pieces)
    keys = {piece.key for piece in pieces}
    return TorchDistPlan(
        tuple(sorted(pieces, key=lambda piece: (piece.key, piece.layer or 0))),
        tuple(extra_states(keys, model.config.num_layers)),
        _common(model, names, with_optimizer),
    )


def _piece(model: WholeModel, prefix: str, full: str, name: str) -> WrittenPiece:
    key, layer = stacked_key(name)
    return WrittenPiece(prefix + key, full, model.specs[full], layer, model.config.num_layers)


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


def _common(model: WholeModel, names: list[str], with_optimizer: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common: dict[str, Any] = {
        "args": Namespace(**_args(model, with_optimizer)),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": model.step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if with_optimizer:
        if is_distributed(model):
            content["distrib_optim_sharding_type"] = "fully_reshardable"
        common["optimizer"] = _optimizer(model, names)
        if model.scheduler is not None:
            common["opt_param_scheduler"] = dict(model.scheduler)
    return common


def _optimizer(model: WholeModel, names: list[str]) -> dict[str, Any]:
    """The optimizer's values that are not tensors."""
    groups = groups_document(model, names)
    scaler = {"grad_scaler": scaler_document(model.scaler)} if model.scaler else {}
    if is_distributed(model):
        kind = {"param_state_sharding_type": "fully_reshardable"}
        return {"optimizer": {"param_groups": groups}, **scaler, **kind}
    inner = {"state": {"common_step": model.num_updates}, "param_groups": groups}
    is_half = model.specs[f"model.{EMBEDDING}"].dtype in HALF_SPECS
    return {"optimizer": inner, **scaler} if is_half else inner


def _args(model: WholeModel, with_optimizer: bool) -> dict[str, Any]:
    return args_document(
        model,
        tp=1,
        split=arrange([model.config.num_layers], pp=1),
        is_legacy=False,
        transformer_impl="transformer_engine",
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        use_distributed_optimizer=is_distributed(model),
        no_save_optim=True if not with_optimizer else None,
        no_save_rng=True,
    )
