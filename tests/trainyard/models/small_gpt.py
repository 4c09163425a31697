"""Options and groups of ranks of small GPTs that the tests of models share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from trainyard.parallel.model import ModelParallel

VOCAB = 64
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def model_parallel(tp: int, cp: int, sp: bool, comm: Any) -> ModelParallel:
    """Groups of tp x cp ranks, tp ranks beside each other."""
    rank, mine = dist.get_rank(), {}
    for name, groups in (
        ("tp", [[i * tp + j for j in range(tp)] for i in range(cp)]),
        ("cp", [[i * tp + j for i in range(cp)] for j in range(tp)]),
    ):
        for members in groups:
            group = dist.new_group(members) if len(members) > 1 else None
            if rank in members:
                mine[name] = group
    return ModelParallel(mine["tp"], mine["cp"], sequence_parallel=sp, cp_comm_type=comm)
