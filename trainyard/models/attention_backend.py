"""The backend of a layer: its needs, what is installed, one line in the log.

A layer asks here when it is built, for every device and dtype it might see, so that nothing is
decided while it runs or is compiled."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from trainyard.attention.base import AttentionBackend, Numerics
from trainyard.attention.build import build_backend
from trainyard.attention.choice import Choice, Device, Needs, Request, choose_backend
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.parallel.model import ModelParallel

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides on a layer's backend, besides device, dtype and batch."""

    request: Request
    head_dim: int
    numerics: Numerics
    window: bool
    sink: bool
    dropout: bool
    deterministic: bool
    context: str | None


@dataclass(frozen=True, slots=True)
class Selected:
    """A choice and its backend; or why there is none."""

    choice: Choice | None
    backend: AttentionBackend | None
    refusal: str = ""

    def get(self) -> AttentionBackend:
        """The backend; ConfigError where there is none."""
        if self.backend is None:
            raise ConfigError(self.refusal)
        return self.backend


Key = tuple[str, torch.dtype, bool]
"""Type of device, dtype, whether samples are packed documents."""


def asked_of(config: TransformerConfig, layer: int, parallel: ModelParallel) -> Asked:
    """What layer `layer`, counted from 0 over the whole model, asks for."""
    request: Request = "flash" if config.use_flash_attn else config.attention_backend
    # Kernels keep scores in fp32, where scaling them by the layer and back does nothing; without it
    # all layers are alike, and are compiled once.
    scaled = config.apply_query_key_layer_scaling and request == "local"
    return Asked(
        request=request,
        head_dim=config.head_dim,
        numerics=Numerics(config.attention_softmax_in_fp32, layer + 1 if scaled else 1),
        window=config.attention_window(layer) is not None,
        sink=config.softmax_type != "vanilla",
        dropout=config.attention_dropout > 0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        context=None if parallel.cp is None else parallel.cp_comm_type,
    )


@lru_cache(maxsize=512)
def backend_table(asked: Asked) -> Mapping[Key, Selected]:
    """The backend for all that a layer might see on this machine."""
    types = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        (kind, dtype, documents): _select(asked, probe_device(kind), dtype, documents)
        for kind in types
        for dtype in DTYPES
        for documents in (False, True)
    }


def _select(asked: Asked, device: Device, dtype: torch.dtype, documents: bool) -> Selected:
    needs = Needs(
        dtype=str(dtype).removeprefix("torch."),
        head_dim=asked.head_dim,
        window=asked.window,
        documents=documents,
        sink=asked.sink,
        dropout=asked.dropout,
        deterministic=asked.deterministic,
        context=asked.context,
    )
    try:
        choice = choose_backend(asked.request, device, needs)
    except ConfigError as error:
        return Selected(None, None, str(error))
    return Selected(choice, build_backend(choice, asked.numerics, asked.deterministic))


def probe_device(kind: str) -> Device:
    """What is here: the current CUDA device and the optional packages."""
    if kind != "cuda":
        return Device("cpu" if kind == "meta" else kind)
    return Device(
        "cuda",
        torch.cuda.get_device_capability(),
        _flash_attn_version(torch.cuda.get_device_capability()),
        _installed("transformer_engine"),
        apex_norm=_installed("apex") and _installed("fused_layer_norm_cuda"),
        apex_fast_norm=_installed("apex.contrib.layer_norm.layer_norm")
        and any(map(_installed, ("fast_layer_norm", "apex.contrib.layer_norm.fast_layer_norm"))),
    )


def _flash_attn_version(capability: tuple[int, int]) -> int:
    """The newest generation that is installed and made for the device."""
    if capability >= (9, 0) and _installed("flash_attn") and _installed("flash_attn.cute"):
        return 4
    if capability[0] == 9 and _installed("flash_attn_interface"):
        return 3
    if _installed("flash_attn"):
        try:
            return 2 if int(importlib.metadata.version("flash_attn").split(".")[0]) == 2 else 0
        except importlib.metadata.PackageNotFoundError:
            return 0
    return 0


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def choose_attention(
    config: TransformerConfig,
    parallel: ModelParallel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    documents: bool = False,
) -> dict[Choice, list[int]]:
    """The backends that the layers will use, each with its layers; refuses before any work what
    cannot be had."""
    layers: dict[Choice, list[int]] = {}
    for layer in range(config.num_layers):
        selected = backend_table(asked_of(config, layer, parallel))[device.type, dtype, documents]
        selected.get()
        assert selected.choice is not None
        layers.setdefault(selected.choice, []).append(layer)
    return layers


def report_attention(
    config: TransformerConfig,
    parallel: ModelParallel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    documents: bool = False,
) -> list[Choice]:
    """Choose, and say in the log which backend the layers will use and why. Returns the different
    choices."""
    layers = choose_attention(config, parallel, device, dtype, documents=documents)
    for choice, numbers in layers.items():
        where = "" if len(layers) == 1 else f" layers={len(numbers)}"
        log.info(
            "attention backend=%s kernel=%s%s: %s",
            choice.backend,
            choice.kernel,
            where,
            choice.reason,
        )
    return list(layers)
