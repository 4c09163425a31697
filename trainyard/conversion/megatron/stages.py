"""Infers the ranks that wrote a Megatron-LM checkpoint from its `args`: the modules of each
pipeline rank, and the order in which it registered the modules of a layer.

Needed to name optimizer states that are stored by position. Raises `Unknown` if the args do not
determine it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.conversion.megatron.names import has_tied_copy, layer_of
from trainyard.conversion.megatron.optimizer import Unknown
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.gpt.checkpoint_names import FINAL_NORM, OUTPUT
from trainyard.parallel.pipeline.partition import Partition, StageLayers, partition

OTHER_ORDERS = ("use_legacy_models", "use_kitchen", "use_transformer_engine_op_fuser")
"""Arguments with which a layer has other modules, or registers them in another order."""

MAX_DEGREE = 2**20


@dataclass(frozen=True, slots=True)
class _Split:
    """Options of `partition`."""

    pipeline_model_parallel_size: int
    num_virtual_stages_per_pipeline_rank: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None


def style_in(args: Mapping[str, Any]) -> str:
    """The order of the modules, a key of `checkpoint_names.REGISTRATION_ORDER`."""
    style = args.get("transformer_impl")
    other = [name for name in OTHER_ORDERS if args.get(name)]
    if style not in ("local", "transformer_engine") or other:
        reason = other[0] if other else f"transformer_impl {style!r:.40}"
        raise Unknown(f"the order in which its modules were registered is not known ({reason})")
    return str(style)


def degrees_in(args: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline ranks."""
    tp, pp = (_count(args, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    if tp is None or pp is None:
        raise Unknown("its args do not give the numbers of tensor and pipeline ranks")
    return tp, pp


def expert_degrees_in(args: Mapping[str, Any], tp: int) -> tuple[int, int]:
    """Ranks that share an expert, and expert-parallel ranks. tp: tensor ranks."""
    etp, ep = (_count(args, f"expert_{kind}_parallel_size") for kind in ("tensor", "model"))
    return etp or tp, ep or 1


def partition_in(args: Mapping[str, Any], num_layers: int) -> Partition:
    """The stages of every pipeline rank."""
    layout = args.get("pipeline_model_parallel_layout")
    if args.get("standalone_embedding_stage") or not isinstance(layout, str | None):
        raise Unknown("its args do not determine the layers of its stages")
    virtual = _count(args, "virtual_pipeline_model_parallel_size") or 1
    if virtual > MAX_LAYERS:
        raise Unknown(f"its args give {virtual} virtual stages, more than any model has layers")
    _, pp = degrees_in(args)
    options = _Split(pp, pipeline_model_parallel_layout=layout)
    if layout is None and pp > 1:
        options = _Split(
            pp,
            virtual if virtual > 1 else None,
            _count(args, "decoder_first_pipeline_num_layers"),
            _count(args, "decoder_last_pipeline_num_layers"),
            bool(args.get("account_for_embedding_in_pipeline_split")),
            bool(args.get("account_for_loss_in_pipeline_split")),
        )
    try:
        return partition(options, num_layers)
    except ConfigError as error:
        raise Unknown(f"its args give no valid stages: {error!s:.200}") from error


def names_on(
    stage: StageLayers, model: Collection[str], config: TransformerConfig, pp: int
) -> list[str]:
    """The parameters of a stage, by our names, including the copy of a tied embedding as output
    layer. model: all names."""
    found = [name for name in model if _is_on(name, stage)]
    return [*found, OUTPUT] if stage.has_output and has_tied_copy(config, pp) else found


def _is_on(name: str, stage: StageLayers) -> bool:
    layer = layer_of(name)
    if layer is not None:
        return layer in stage.layers
    at_the_end = name == OUTPUT or name.startswith(FINAL_NORM)
    return stage.has_output if at_the_end else stage.has_embedding


def _count(args: Mapping[str, Any], name: str) -> int | None:
    found = args.get(name)
    if found is not None and (type(found) is not int or not 0 < found <= MAX_DEGREE):
        raise Unknown(f"its args give {name} {found!r:.40}, wanted a number above 0")
    return found
