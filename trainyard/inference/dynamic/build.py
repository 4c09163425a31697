"""From a loaded model and options to an engine: the cache, its size, the ranks.

On the first rank of a model

    with build_engine(loaded, config) as engine:
        number = engine.add(request)
        while engine.has_work():
            updates = engine.step()

and on every other one `build_engine(loaded, config).run()`, which returns when that ends."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from trainyard.attention.paged_cache import PagedKVCache
from trainyard.attention.paged_flash import BlockNeeds, problem_of_blocks
from trainyard.attention.select import probe_device
from trainyard.attention.slot_states import SlotStates
from trainyard.errors import ConfigError
from trainyard.inference.dynamic.blocks import BlockPool
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.graphs import DecodeGraphs, graph_sizes
from trainyard.inference.dynamic.ranks import Follower, Link
from trainyard.inference.dynamic.runner import PagedRunner
from trainyard.inference.dynamic.scheduler import Scheduler
from trainyard.inference.dynamic.sizes import cache_sizes
from trainyard.inference.kv_cache import kv_dtype_of
from trainyard.inference.layer_states import empty_states
from trainyard.inference.load import ModelOnRanks
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of
from trainyard.models.gpt.model import GPTModel
from trainyard.models.quantized import quantize_layers
from trainyard.parallel.groups import ALONE, ProcessGroups

log = logging.getLogger(__name__)


def build_engine(
    loaded: ModelOnRanks, config: DynamicConfig, *, max_seq_length: int | None = None
) -> DynamicEngine | Follower:
    """The engine on the first of the ranks that hold a model, a follower on each other one; all of
    them call this. max_seq_length: most tokens of a prompt with its output; unset: the positions of
    the model. ConfigError for a family that it does not run."""
    return engine_of(
        loaded.model,
        config,
        loaded.groups,
        loaded.tokenizer.vocab_size,
        max_seq_length=max_seq_length,
    )


def engine_of(
    model: GPTModel,
    config: DynamicConfig,
    groups: ProcessGroups = ALONE,
    vocab_size: int | None = None,
    *,
    max_seq_length: int | None = None,
) -> DynamicEngine | Follower:
    """`build_engine` of a model that is in memory. vocab_size: tokens that the tokenizer knows."""
    check_family(model.config)
    if groups.dims.dp > 1:
        needed = groups.dims.tp * groups.dims.pp
        raise ConfigError(
            f"the dynamic engine runs one copy of the model, on {needed} ranks (tensor x pipeline "
            f"parallel), and {groups.dims.world_size} were started; start {needed}"
        )
    _check_graphs(model.config, config, groups)
    flash_version = _flash_version(model, config)
    if config.num_speculative_tokens and _has_states(model.config):
        raise ConfigError(
            f"--num-speculative-tokens {config.num_speculative_tokens}: a wrong guess cannot be "
            f"taken back from the state of a {model.config.model_type}; give 0"
        )
    if config.inference_weight_dtype is not None:
        quantize_layers(model, config.inference_weight_dtype)
    length = min(max_seq_length or model.config.positions, model.config.positions)
    num_blocks, num_slots = cache_sizes(model, config, groups, length)
    size = config.inference_dynamic_batching_block_size
    cache = _cache(
        model,
        num_blocks,
        size,
        num_slots,
        groups.dims.tp,
        kv_dtype=kv_dtype_of(config.kv_cache_dtype),
        flash_version=flash_version,
    )
    runner, link = PagedRunner(model, cache, groups, vocab_size), Link(groups, model.device)
    most = min(length, num_blocks * size)
    if config.inference_dynamic_batching_num_cuda_graphs:
        runner.graphs = _graphs(runner, model, config, num_slots, most)
    if not link.is_first:
        return Follower(runner, link)
    fraction = config.inference_dynamic_batching_buffer_guaranteed_fraction
    scheduler = Scheduler(
        BlockPool(
            num_blocks,
            # Prefixes cannot be reused: the states behind them are not kept.
            keeps_texts=not config.disable_prefix_caching and not _has_states(model.config),
        ),
        size,
        max_requests=num_slots,
        max_tokens=config.inference_dynamic_batching_max_tokens,
        reserve=math.ceil(fraction * num_blocks),
        chunked=not config.disable_chunked_prefill,
    )
    return DynamicEngine(
        runner,
        scheduler,
        link,
        max_tokens=most,
        num_speculative_tokens=config.num_speculative_tokens,
    )


def check_family(config: TransformerConfig) -> None:
    """Refuse a model that does not continue texts from left to right."""
    family = family_of(config)
    if not (family.generates and family.predicts_next):
        raise ConfigError(
            "the dynamic engine runs models that continue a text from left to right, which a "
            f"{config.model_type} does not; use the static engine, where it generates"
        )


def _has_states(config: TransformerConfig) -> bool:
    return any(config.state_shapes(layer) for layer in range(config.num_layers))


def _cache(
    model: GPTModel,
    num_blocks: int,
    size: int,
    num_slots: int,
    tp: int,
    *,
    kv_dtype: torch.dtype | None,
    flash_version: int,
) -> PagedKVCache:
    """Blocks of `size` tokens and slots, of the layers of this stage."""
    config, layers = model.config, model.decoder.numbers
    on: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    return PagedKVCache(
        num_blocks,
        size,
        config.cached_heads(tp),
        layers=filter(config.has_attention, layers),
        states=SlotStates(empty_states(config, num_slots + 1, layers=layers, tp_size=tp, **on)),
        is_latent=config.latent.enabled,
        kv_dtype=kv_dtype,
        flash_version=flash_version,
        **on,
    )


def _graphs(
    runner: PagedRunner,
    model: GPTModel,
    config: DynamicConfig,
    max_requests: int,
    most_tokens: int,
) -> DecodeGraphs:
    """The recorded steps; most_tokens: of a request."""
    graphs = DecodeGraphs(
        model,
        runner.cache,
        runner.vocab_size,
        graph_sizes(config.inference_dynamic_batching_num_cuda_graphs, max_requests),
        most_tokens,
        compiled=model.device.type == "cuda",
    )
    graphs.record()
    return graphs


def _flash_version(model: GPTModel, options: DynamicConfig) -> int:
    """The generation of flash-attn that was asked for, 0 if none was; ConfigError if it cannot."""
    if options.inference_attention_backend is None:
        return 0
    device, config = probe_device(model.device.type), model.config
    kept = kv_dtype_of(options.kv_cache_dtype) or model.dtype
    problem = "it takes no latents (--multi-latent-attention)" if config.latent.enabled else None
    problem = problem or problem_of_blocks(
        device,
        BlockNeeds(
            dtype=str(model.dtype).removeprefix("torch."),
            kv_dtype=str(kept).removeprefix("torch."),
            block_size=options.inference_dynamic_batching_block_size,
            width=config.head_dim,
            value_width=config.value_dim,
            sink=config.softmax_type != "vanilla",
        ),
    )
    if problem is not None:
        raise ConfigError(
            f"--inference-attention-backend {options.inference_attention_backend}: {problem}; "
            "leave it out for the kernel of this package, or torch"
        )
    return device.flash_attn


def _check_graphs(config: TransformerConfig, options: DynamicConfig, groups: ProcessGroups) -> None:
    """Refuse CUDA graphs of a step that waits for the device or for other ranks."""
    count = options.inference_dynamic_batching_num_cuda_graphs
    wrong = {
        f"a mixture of {config.experts.num_experts} experts": config.experts.enabled,
        "multi-latent attention": config.latent.enabled,
        f"{groups.dims.world_size} ranks": groups.dims.world_size > 1,
    }
    if count and (found := [what for what, is_wrong in wrong.items() if is_wrong]):
        raise ConfigError(
            f"--inference-dynamic-batching-num-cuda-graphs {count}: a step with "
            f"{' and '.join(found)} is not recorded; give 0"
        )
