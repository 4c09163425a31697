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

import torch

from trainyard.attention.paged_cache import PagedKVCache
from trainyard.errors import ConfigError
from trainyard.inference.dynamic.blocks import BlockPool
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.graphs import DecodeGraphs, graph_sizes
from trainyard.inference.dynamic.ranks import Follower, Link
from trainyard.inference.dynamic.runner import PagedRunner
from trainyard.inference.dynamic.scheduler import Scheduler
from trainyard.inference.load import ModelOnRanks
from trainyard.machine import memory_bytes
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.quantized import quantize_layers
from trainyard.parallel.device import GIBIBYTE, check_memory
from trainyard.parallel.groups import ALONE, ProcessGroups

log = logging.getLogger(__name__)

OF_GPU, OF_MACHINE = 0.9, 0.5
"""Shares of the memory that the cache takes at most, unless its size is given."""


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
    if config.inference_weight_dtype is not None:
        quantize_layers(model, config.inference_weight_dtype)
    length = min(max_seq_length or model.config.positions, model.config.positions)
    num_blocks = _num_blocks(model, config, groups, length)
    size = config.inference_dynamic_batching_block_size
    cache = PagedKVCache(
        num_blocks,
        size,
        model.config.cached_heads(groups.dims.tp),
        layers=model.decoder.numbers,
        is_latent=model.config.latent.enabled,
        dtype=model.dtype,
        device=model.device,
    )
    runner, link = PagedRunner(model, cache, groups, vocab_size), Link(groups, model.device)
    most = min(length, num_blocks * size)
    if config.inference_dynamic_batching_num_cuda_graphs:
        runner.graphs = _graphs(runner, model, config, most)
    if not link.is_first:
        return Follower(runner, link)
    fraction = config.inference_dynamic_batching_buffer_guaranteed_fraction
    scheduler = Scheduler(
        BlockPool(num_blocks, keeps_texts=not config.disable_prefix_caching),
        size,
        max_requests=config.inference_dynamic_batching_max_requests,
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
    """Refuse a model whose memory of a text is not keys and values of its tokens."""
    kind = config.model_type
    if kind not in ("gpt", "retro"):
        raise ConfigError(
            f"the dynamic engine runs decoders whose cache is keys and values, and a {kind} has "
            "another memory of its text; use the static engine, where it generates"
        )


def _graphs(
    runner: PagedRunner, model: GPTModel, config: DynamicConfig, most_tokens: int
) -> DecodeGraphs:
    """The recorded steps; most_tokens: of a request."""
    graphs = DecodeGraphs(
        model,
        runner.cache,
        runner.vocab_size,
        graph_sizes(
            config.inference_dynamic_batching_num_cuda_graphs,
            config.inference_dynamic_batching_max_requests,
        ),
        most_tokens,
        compiled=model.device.type == "cuda",
    )
    graphs.record()
    return graphs


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


def block_bytes(config: TransformerConfig, groups: ProcessGroups, size: int, each: int) -> int:
    """Memory of a block of `size` tokens on the rank with the most layers; each: bytes of a
    number."""
    of_token = sum(heads * width for heads, width in config.cached_heads(groups.dims.tp))
    return -(-config.num_layers // groups.dims.pp) * of_token * size * each


def _num_blocks(model: GPTModel, config: DynamicConfig, groups: ProcessGroups, length: int) -> int:
    """Blocks of the cache, the same on every rank."""
    size = config.inference_dynamic_batching_block_size
    each = block_bytes(model.config, groups, size, model.dtype.itemsize)
    given = config.inference_dynamic_batching_buffer_size_gb
    if given is None:
        of_request = -(-length // size)
        what = f"the keys and values of one request of {length} tokens, in blocks of {size}, take"
        advice = "lower --inference-max-seq-length or --inference-dynamic-batching-block-size"
        check_memory(what, of_request * each, model.device, advice)
        wanted = config.inference_dynamic_batching_max_requests * of_request
        return _least(max(min(wanted, _memory(model.device) // each), of_request), groups, model)
    option = f"--inference-dynamic-batching-buffer-size-gb {given}"
    check_memory(f"{option} is", given * GIBIBYTE, model.device, "lower it")
    if not (blocks := int(given * GIBIBYTE) // each):
        raise ConfigError(
            f"{option} holds no block of {size} tokens, which takes {each / GIBIBYTE:.3g} GiB; "
            "raise it, or lower --inference-dynamic-batching-block-size"
        )
    return blocks


def _memory(device: torch.device) -> int:
    """Bytes that a cache may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of weights that were in another dtype
        return int(OF_GPU * torch.cuda.mem_get_info(device)[0])
    return int(OF_MACHINE * memory_bytes())


def _least(count: int, groups: ProcessGroups, model: GPTModel) -> int:
    """The least of the counts of all ranks, whose free memory may differ."""
    if groups.model is None:
        return count
    least = torch.tensor(count, device=model.device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=groups.model)
    return int(least)
