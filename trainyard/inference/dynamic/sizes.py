"""How many blocks and slots a cache has: what the memory of a device holds, on all ranks alike."""

from __future__ import annotations

import logging
from itertools import pairwise

import torch

from trainyard.errors import ConfigError
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.kv_cache import kv_dtype_of
from trainyard.machine import memory_bytes
from trainyard.models.config import TransformerConfig
from trainyard.models.costs.inference_memory import kv_numbers, state_bytes
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.device import GIBIBYTE, check_memory
from trainyard.parallel.groups import ProcessGroups

log = logging.getLogger(__name__)

OF_GPU, OF_MACHINE = 0.9, 0.5
"""Shares of the memory that the cache takes at most, unless its size is given."""


def block_bytes(config: TransformerConfig, groups: ProcessGroups, size: int, each: int) -> int:
    """Memory of a block of `size` tokens on the rank with the most; each: bytes of a number."""
    stages = _layers_of_stages(config, groups)
    return max(kv_numbers(config, layers, groups.dims.tp) for layers in stages) * size * each


def slot_bytes(config: TransformerConfig, groups: ProcessGroups, each: int) -> int:
    """Memory of the states of a request on the rank with the most; each: bytes of a weight."""
    stages = _layers_of_stages(config, groups)
    return max(state_bytes(config, layers, groups.dims.tp, each) for layers in stages)


def _layers_of_stages(config: TransformerConfig, groups: ProcessGroups) -> list[range]:
    base, extra = divmod(config.num_layers, groups.dims.pp)
    ends = [base * (stage + 1) + min(stage + 1, extra) for stage in range(groups.dims.pp)]
    return [range(begin, end) for begin, end in pairwise([0, *ends])]


def cache_sizes(
    model: GPTModel, config: DynamicConfig, groups: ProcessGroups, length: int
) -> tuple[int, int]:
    """Blocks of the cache, and slots: the same on every rank.

    As many slots as --inference-dynamic-batching-max-requests, if beside each there is room for the
    blocks of half of the longest request; else as many as there are with those. Blocks get the
    rest. Memory of a block and a slot for what belongs to no request is taken off."""
    size = config.inference_dynamic_batching_block_size
    kept = kv_dtype_of(config.kv_cache_dtype) or model.dtype
    block = block_bytes(model.config, groups, size, kept.itemsize)
    slot = slot_bytes(model.config, groups, model.dtype.itemsize)
    given = config.inference_dynamic_batching_buffer_size_gb
    of_request, most = -(-length // size), config.inference_dynamic_batching_max_requests
    scratch = block + slot
    if given is None:
        what = f"the cache of one request of {length} tokens, in blocks of {size}, takes"
        advice = "lower --inference-max-seq-length or --inference-dynamic-batching-block-size"
        check_memory(what, of_request * block + slot + scratch, model.device, advice)
        memory, least = _memory(model.device) - scratch, of_request
    else:
        check_memory(
            f"--inference-dynamic-batching-buffer-size-gb {given} is",
            given * GIBIBYTE,
            model.device,
            "lower it",
        )
        memory, least = int(given * GIBIBYTE) - scratch, 1
        if memory < block + slot:
            beside = " beside the states of a request" if slot else ""
            raise ConfigError(
                f"--inference-dynamic-batching-buffer-size-gb {given} holds no block of {size} "
                f"tokens{beside}: two of each, one for padding, take "
                f"{2 * (block + slot) / GIBIBYTE:.3g} GiB; raise it, or lower "
                "--inference-dynamic-batching-block-size"
            )
    # Requests of half the length are enough to keep all slots busy.
    beside_each = -(-of_request // 2) * block
    slots = min(most, max(memory // (slot + beside_each), 1)) if slot else most
    if slots < most:
        log.info(
            "memory holds the states of %d requests; "
            "--inference-dynamic-batching-max-requests %d is lowered to that",
            *(slots, most),
        )
    blocks = max((memory - slots * slot) // block, least) if block else slots * of_request
    if given is None:
        blocks = min(blocks, slots * of_request)
    return _least((blocks, slots), groups, model)


def _memory(device: torch.device) -> int:
    """Bytes that a cache may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of weights that were in another dtype
        return int(OF_GPU * torch.cuda.mem_get_info(device)[0])
    return int(OF_MACHINE * memory_bytes())


def _least(sizes: tuple[int, int], groups: ProcessGroups, model: GPTModel) -> tuple[int, int]:
    """The least of the sizes of all ranks, whose free memory may differ."""
    if groups.model is None:
        return sizes
    least = torch.tensor(sizes, device=model.device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=groups.model)
    blocks, slots = least.tolist()
    return blocks, slots
