"""Optimizers of Megatron-LM's checkpoints for tests, as `megatron_files` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Whole = Mapping[str, Tensor]
"""Tensors of the whole model by our names."""


def add_optimizer(
    tree: dict[str, Any],
    chunks: list[list[tuple[list[str], str]]],
    states: Mapping[str, Whole],
    cut: Callable[[Whole, str], Tensor],
    is_distributed: bool,
) -> dict[Any, Any] | None:
    """Into the tree; returns what goes to a file of its own."""
    names = [ours for items in chunks for _, ours in items]
    groups: dict[bool, list[str]] = {}
    for name in names:
        vector = name.endswith(".bias") or states["exp_avg"][name].ndim == 1
        groups.setdefault(not vector, []).append(name)
    param_groups: list[dict[str, Any]] = []
    for decays in groups:
        rates = {"lr": 1e-4, "weight_decay": 0.1 * decays, "betas": (0.9, 0.95)}
        flags = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        steps = {"step": 98} if "param" in states else {}  # as fused kernels keep it
        param_groups.append({"wd_mult": float(decays), **flags, **rates, **steps})
    tree["opt_param_scheduler"] = {"max_lr": 1e-4, "num_steps": 6400, "lr_decay_style": "cosine"}
    if is_distributed:
        tree["optimizer"] = {"optimizer": {"param_groups": param_groups}, "grad_scaler": None}
        return _vectors(chunks, states, cut)
    order = [name for members in groups.values() for name in members]
    numbers = iter(range(len(order)))
    for group, members in zip(param_groups, groups.values(), strict=True):
        group["params"] = [next(numbers) for _ in members]
    state = {
        number: {kind: cut(states[kind], name) for kind in ("exp_avg", "exp_avg_sq")}
        for number, name in enumerate(order)
    }
    inner = {"state": state, "param_groups": param_groups}
    if "param" not in states:
        for own in state.values():
            own["step"] = torch.tensor(98.0)  # as torch's Adam keeps it
        tree["optimizer"] = inner
        return None
    main = [[cut(states["param"], name) for name in members] for members in groups.values()]
    tree["optimizer"] = {"optimizer": inner, "fp32_from_fp16_params": main}
    return None


def _vectors(
    chunks: list[list[tuple[list[str], str]]],
    states: Mapping[str, Whole],
    cut: Callable[[Whole, str], Tensor],
) -> dict[Any, Any]:
    vectors: dict[Any, Any] = {"buckets_coalesced": True}
    for number, items in enumerate(chunks):
        flat = {
            kind: torch.cat([cut(states[kind], ours).flatten() for _, ours in reversed(items)])
            for kind in ("param", "exp_avg", "exp_avg_sq")
        }
        size = flat["param"].numel()
        vectors[number] = {(torch.bfloat16, torch.float32): {**flat, "numel_unpadded": size}}
    return vectors
