"""Layers compiled one by one with `torch.compile`.

All layers of a model share one compiled graph, so the first step compiles a layer's forward and
backward once. What joins them - recomputation, offloading, the pipeline, waiting for parameters -
stays outside and may do as it likes."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

GRAPHS = 64
"""Variants of a layer that may be compiled: training and evaluation, with a mask and without, for
each kind of layer."""


def should_compile(option: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Whether --compile-layers asks for it on this device."""
    return option == "on" or (option == "auto" and device.type == "cuda")


def compile_chunk(chunk: nn.Module) -> list[nn.Module]:
    """Have the layers of a chunk run compiled; returns what waits for updated parameters: the
    layers, and the modules with parameters around them that run uncompiled.

    `forward` is compiled and not the module: hooks of the module run before it, uncompiled."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    decoder = getattr(chunk, "decoder", None)
    held = getattr(decoder, "layers", None)
    layers = list(held.values()) if isinstance(held, nn.ModuleDict) else []
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    losses = getattr(chunk, "losses", None)
    if losses is not None:  # output layer and cross entropy in few passes over the logits
        chunk.losses = torch.compile(losses, dynamic=False)  # type: ignore[assignment]
    inside = {module for layer in layers for module in layer.modules()}
    if losses is not None and isinstance(output := getattr(chunk, "output_layer", None), nn.Module):
        inside.update(output.modules())
    around = (m for m in chunk.modules() if any(True for _ in m.parameters(recurse=False)))
    return [*layers, *(module for module in around if module not in inside)]
