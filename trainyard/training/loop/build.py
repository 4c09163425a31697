"""Builds a model in training from its options: chunks, gradient buffers, optimizer, pipeline,
compiled layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn

from trainyard.datasets.loader import Batch
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.attention import choose_attention
from trainyard.models.block import TransformerBlock
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of
from trainyard.models.fp8 import report_fp8, use_fp8
from trainyard.models.norms.select import report_norm
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.models.tied import copy_of, shared_embedding
from trainyard.optim.build import build_optimizer, params_dtype
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.groups import is_vector
from trainyard.optim.kernels import report_optimizer
from trainyard.optim.narrow_moments import report_moments
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.device import default_dtype
from trainyard.parallel.groups import ProcessGroups, gather_objects
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.pipeline.p2p import HiddenSpec, PipelineLinks, connect
from trainyard.parallel.pipeline.partition import partition
from trainyard.parallel.pipeline.runner import PipelineRunner
from trainyard.parallel.sharding import held_part, shard_of
from trainyard.training.loop.data_parallel import data_parallel_parts, is_fully_sharded
from trainyard.training.loop.microbatch import Preparation
from trainyard.training.loop.step import StepOptions, TrainModule
from trainyard.training.options.pretrain import PretrainConfig

log = logging.getLogger(__name__)

ModelProvider = Callable[[ModelParallel, PipelineStage], nn.Module]
"""Builds the part of a model on one stage: a module with `forward_step`, whose sharded parameters
are marked by `mark_shard`. Weights may be uninitialised."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that decide how it is sharded."""

    num_layers: int
    hidden_size: int
    seq_length: int
    """Tokens of a sample between pipeline stages."""
    micro_batch_size: int
    fp32_between_stages: bool = False
    """Stages exchange fp32 hidden states (--fp32-residual-connection)."""


def built_in_provider(
    config: TransformerConfig, padded_vocab_size: int, true_vocab_size: int | None = None
) -> ModelProvider:
    """Builds a model of the configuration's family. Rows of the vocabulary from `true_vocab_size`
    on are padding; unset: none."""
    model_class = family_of(config).load_class()

    def provide(parallel: ModelParallel, pipeline_stage: PipelineStage) -> nn.Module:
        model: nn.Module = model_class(
            config, padded_vocab_size, parallel, pipeline_stage, true_vocab_size
        )
        return model

    return provide


def model_sizes(
    config: TransformerConfig, micro_batch_size: int, *, with_neighbors: bool = True
) -> ModelSizes:
    """The sizes that decide how a model is sharded. with_neighbors: samples bring those that the
    model asks for."""
    return ModelSizes(
        config.all_layers,
        config.hidden_size,
        config.stream_length if with_neighbors else config.seq_length,
        micro_batch_size,
        config.fp32_residual_connection,
    )


def build_train_module(
    provider: ModelProvider,
    sizes: ModelSizes,
    parallel: ParallelConfig,
    optimizer_config: OptimizerConfig,
    precision: PrecisionConfig,
    groups: ProcessGroups,
    device: torch.device,
    options: StepOptions,
    *,
    own_positions: bool = False,
    compile_layers: bool = False,
    keeps_gradients: bool = False,
    no_decay: Callable[[str, torch.Tensor], bool] | None = None,
) -> TrainModule:
    """This rank's part of a model in training; the caller fills its weights.

    keeps_gradients: as in `data_parallel_parts`. no_decay: selects parameters without weight decay
    by global name; unset: vectors."""
    chunks = build_chunks(provider, sizes, parallel, precision, groups, device)
    copies = _copied_names(chunks)
    gradients = [
        data_parallel_parts(
            *(chunk, parallel.data_parallel, precision, groups, copies, device),
            always_flat=optimizer_config.offloaded > 0.0,
            keeps_gradients=keeps_gradients,
        )
        for chunk in chunks
    ]
    optimizer = build_optimizer(
        [part for parts in gradients for part in parts],
        optimizer_config,
        precision,
        groups,
        device=device,
        tied=next((t for c in chunks if (t := shared_embedding(c)) is not None), None),
        copies=copies,
        no_weight_decay=no_decay or is_vector,
    )
    optimizer.timed = options.timed
    for chunk, parts in zip(chunks, gradients, strict=True):
        units = compile_chunk(chunk) if compile_layers else None
        for part in parts:
            if part.gather is not None:
                part.gather.install(chunk, units)

    def before_last_backward(chunk: int) -> None:
        for part in gradients[chunk]:
            part.sync_on_next_backward()

    links = _links(sizes, parallel, precision, groups, device, len(chunks))

    def make_runner(train_module: TrainModule) -> PipelineRunner[Batch]:
        return PipelineRunner(
            train_module.chunks,
            train_module.forward_step,
            links,
            group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage,
            before_last_backward=before_last_backward,
            timed=options.timed,
        )

    preparation = Preparation(groups, device, own_positions)
    return TrainModule(chunks, optimizer, groups, preparation, options, make_runner)


def _copied_names(chunks: Sequence[nn.Module]) -> dict[str, str]:
    """Names of parameters that repeat another's, each with the name of that one."""
    return {
        name: original
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if (original := copy_of(parameter)) is not None
    }


def build_chunks(
    provider: ModelProvider,
    sizes: ModelSizes,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    groups: ProcessGroups,
    device: torch.device,
) -> list[nn.Module]:
    """The modules of this rank, on its device and in the dtype of the run."""
    model_parallel = groups.model_parallel(parallel)
    parts = partition(parallel, sizes.num_layers)[groups.pp_rank]
    # Fully sharded, no rank has room for all: the memory on the host is never touched.
    place = torch.device("cpu") if is_fully_sharded(parallel.data_parallel, groups) else device
    with place, default_dtype(params_dtype(precision)):
        chunks = [
            provider(
                model_parallel, PipelineStage(part.layers, part.has_embedding, part.has_output)
            )
            for part in parts
        ]
    if precision.fp8 is not None:
        for chunk in chunks:
            use_fp8(chunk, precision.fp8, *precision.bf16_layers)
    return chunks


def _links(
    sizes: ModelSizes,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    groups: ProcessGroups,
    device: torch.device,
    num_chunks: int,
) -> PipelineLinks | None:
    if groups.pp is None:
        return None
    tokens = sizes.seq_length // groups.dims.cp
    if parallel.sequence_parallel:
        tokens //= groups.dims.tp
    hidden = HiddenSpec(
        (tokens, sizes.micro_batch_size, sizes.hidden_size),
        torch.float32 if sizes.fp32_between_stages else params_dtype(precision),
        device,
    )
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    return connect(groups, hidden, num_chunks, timeout)


def parameter_count(train_module: TrainModule) -> int:
    """Parameters on this rank: of fully sharded ones, what it keeps."""
    return sum(held_part(p)[0].numel() for c in train_module.chunks for p in c.parameters())


def whole_parameter_count(train_module: TrainModule) -> int:
    """Parameters of the whole model, each counted once; all ranks call it together."""
    counts: dict[str, int] = {}
    for chunk in train_module.chunks:
        for name, parameter in chunk.named_parameters():
            if copy_of(parameter) is None:
                shard = shard_of(parameter)
                counts[name] = parameter.numel() if shard is None else math.prod(shard.shape)
    stages = gather_objects(counts, train_module.groups.pp)
    return sum({name: count for stage in stages for name, count in stage.items()}.values())


IN_16_BITS = "so weights are gathered in bf16, two bytes for each number"
GATHER_OF_RECIPE = (
    "no effect with --fp8-recipe {}, whose products would cast weights from 8 bits to other values "
    "than from bf16, {}; --fp8-recipe tensorwise and blockwise gather in 8 bits"
)
GATHER_OF_SHARDS = (
    "no effect where gradients or weights are sharded, {}; --use-distributed-optimizer alone "
    "gathers in 8 bits"
)
HISTORY_IDLE = "no effect: they only apply with --fp8-recipe delayed"

GRAPHS = 64
"""Limit of compiled variants of a layer: training and evaluation, with a mask and without, for each
kind of layer."""


def should_compile(option: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Whether to compile layers on this device (--compile-layers)."""
    return option == "on" or (option == "auto" and device.type == "cuda")


def compile_chunk(chunk: nn.Module) -> list[nn.Module]:
    """Compile each layer of a chunk. Returns the modules that wait for updated parameters: the
    layers, and uncompiled modules around them with parameters.

    All layers share one compiled graph, so the first step compiles one layer. Recomputation,
    offloading, pipeline and parameter gather stay outside of it. Only `forward` is compiled: hooks
    of the module run before it, uncompiled."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    blocks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    layers = [layer for block in blocks for layer in block.layers.values()]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    losses = getattr(chunk, "losses", None)
    if losses is not None:  # output layer and cross entropy in few passes over the logits
        chunk.losses = torch.compile(losses, dynamic=False)  # type: ignore[assignment]
    inside = {module for layer in layers for module in layer.modules()}
    for name in ("lm_head", "output_layer") if losses is not None else ():
        if isinstance(part := getattr(chunk, name, None), nn.Module):
            inside.update(part.modules())
    around = (m for m in chunk.modules() if any(True for _ in m.parameters(recurse=False)))
    return [*layers, *(module for module in around if module not in inside)]


def _idle_gather(data: DataParallelConfig, fp8: Fp8Recipe) -> str:
    """Why --fp8-param-gather has no effect; empty if it has, or was not given."""
    if not data.fp8_param_gather:
        return ""
    if not fp8.survives_decoding:
        return GATHER_OF_RECIPE.format(fp8.scaling, IN_16_BITS)
    return GATHER_OF_SHARDS.format(IN_16_BITS) if data.fully_shards else ""


def report_kernels(
    config: PretrainConfig,
    parallel: ModelParallel,
    device: torch.device,
    *,
    is_built_in: bool,
    say: bool,
) -> None:
    """Choose the kernels of attention, norms, 8-bit products and optimizer; ConfigError for one
    that is not available. say: log one line for each, with the reason; on one rank. A user's model
    chooses its own kernels, except for the optimizer."""
    if is_built_in:
        dtype = params_dtype(config.precision)
        choose_attention(
            config.model,
            parallel,
            device,
            dtype,
            documents=config.bounds_attention
            or family_of(config.model).of_sentences,  # padding is a document
            report=say,
        )
        compiled = should_compile(config.training.compile_layers, device)
        report_norm(config.model, device, dtype, compiled=compiled, say=say)
        family_of(config.model).report_kernels(config.model, device, say=say)
    if config.precision.fp8 is not None:
        report_fp8(config.precision.fp8, device, say=say)
        if say and config.precision.has_idle_history:
            log.info("--fp8-margin and --fp8-amax-...: %s", HISTORY_IDLE)
        idle = _idle_gather(config.parallel.data_parallel, config.precision.fp8)
        if say and idle:
            log.warning("--fp8-param-gather: %s", idle)
    report_optimizer(config.optimizer, device, say=say)
    report_moments(config.precision, config.optimizer.adam_beta2, say=say)
