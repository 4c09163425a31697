"""Chooses and builds the attention backend: a pure function of the request, the device and what a
layer needs, then a table for everything that a layer can meet on this machine.

`--attention-backend` as in Megatron-LM: flash is FlashAttention (the flash-attn package if it is
installed, else torch's kernel), fused is cuDNN (through torch, or through Transformer Engine for
what torch does not pass on), unfused is matrix products and a softmax in torch's order, local the
same in plain torch here; auto takes the fastest that fits."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from trainyard.attention.base import AttentionBackend, Numerics
from trainyard.attention.flash import FlashBackend
from trainyard.attention.local import LocalBackend
from trainyard.attention.sdpa import SdpaBackend
from trainyard.attention.te import TransformerEngineBackend
from trainyard.errors import ConfigError

Request = Literal["auto", "flash", "fused", "unfused", "local"]
Backend = Literal["sdpa", "flash", "te", "local"]

HALVES = ("float16", "bfloat16")
CUDNN_HEAD_DIM, FLASH_HEAD_DIM = 128, 256
"""Widest head supported forward and backward on every GPU generation."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Device:
    """A device and the installed packages with kernels for it."""

    type: str
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability: (8, 0) Ampere, (9, 0) Hopper, (10, 0) Blackwell."""
    flash_attn: int = 0
    """Major version of the flash-attn package; 0: not installed."""
    transformer_engine: bool = False
    apex_norm: bool = False
    """apex with its fused normalisations."""
    apex_fast_norm: bool = False
    """apex.contrib with its persistent LayerNorm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a layer asks of its kernel."""

    head_dim: int
    dtype: str = ""
    """Of queries, keys and values: bfloat16."""
    window: bool = False
    documents: bool = False
    sink: bool = False
    bias: bool = False
    """Numbers that are added to the scores (--position-embedding-type relative)."""
    dropout: bool = False
    deterministic: bool = False
    context: str | None = None
    """--cp-comm-type where sequences are cut over ranks."""

    @property
    def parts_of_keys(self) -> bool:
        """Whether results over parts of the keys are combined, which needs the log-sum-exp."""
        return self.sink or self.context in ("p2p", "allgather")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A backend, its kernel, and why."""

    backend: Backend
    kernel: str
    """cudnn, flash, efficient, math, cpu; of the package: flash2, flash3, flash4."""
    reason: str
    strict: bool = False
    """Requested by name: no other kernel may replace it."""


def choose_backend(request: Request, device: Device, needs: Needs) -> KernelChoice:
    """The first candidate that fits; ConfigError lists why each one does not."""
    problems: list[str] = []
    candidates = _candidates(request, device, needs)
    for backend, kernel in candidates:
        problem = _problem(backend, kernel, device, needs)
        if problem is None:
            return KernelChoice(
                backend, kernel, _reason(request, device, problems), request != "auto"
            )
        problems.append(f"{_name(backend, kernel)} {problem}")
    raise ConfigError(
        f"--attention-backend {request} is not available here: {'; '.join(problems)}. Use "
        "--attention-backend auto, or unfused, which always works"
    )


def _candidates(request: Request, device: Device, needs: Needs) -> list[tuple[Backend, str]]:
    cudnn: tuple[Backend, str] = ("sdpa", "cudnn")
    package: tuple[Backend, str] = ("flash", f"flash{device.flash_attn}")
    flash: tuple[Backend, str] = ("sdpa", "flash")
    math: tuple[Backend, str] = ("sdpa", "math")
    if request == "local":
        return [("local", "math")]
    if request == "unfused":
        return [math]
    if request == "fused":
        return [cudnn, ("te", "cudnn")]
    if device.type == "cpu":
        return [("sdpa", "cpu")]
    flashes = [package, flash] if device.flash_attn else [flash]
    if request == "flash":
        return flashes
    if device.type != "cuda":
        return [math]
    # cuDNN is 1.6 to 1.9 times as fast as FlashAttention-2 on Hopper, slower on Ampere.
    ordered = [cudnn, *flashes] if device.capability >= (9, 0) else [*flashes, cudnn]
    return [*ordered, ("sdpa", "efficient"), math]


def _problem(backend: Backend, kernel: str, device: Device, needs: Needs) -> str | None:
    """Why a candidate does not fit, as a verb phrase; None if it does."""
    if kernel in ("math", "cpu"):
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if kernel == "efficient":
        return _problem_of_efficient(needs)
    if needs.bias:
        return "adds nothing to scores (--position-embedding-type relative)"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or more, not {_dotted(device.capability)}"
    if needs.dtype not in HALVES:
        return f"computes in bf16 and fp16, not {needs.dtype}"
    limit = CUDNN_HEAD_DIM if kernel == "cudnn" else FLASH_HEAD_DIM
    if needs.head_dim > limit or needs.head_dim % 8:
        return f"takes heads of a multiple of 8 up to {limit} channels, not {needs.head_dim}"
    if backend == "flash":
        return _problem_of_package(kernel, device, needs)
    if backend == "te":
        return _problem_of_te(device, needs)
    return _problem_of_cudnn(needs) if kernel == "cudnn" else None


def _problem_of_cudnn(needs: Needs) -> str | None:
    if needs.deterministic:
        return "is not bitwise reproducible in its backward pass (--deterministic-mode)"
    if needs.window:
        return "has no windows (--window-size) through torch"
    if needs.documents:
        return "has no packed documents through torch"
    return None


def _problem_of_efficient(needs: Needs) -> str | None:
    if needs.deterministic:
        return "is not bitwise reproducible in its backward pass (--deterministic-mode)"
    if needs.parts_of_keys:
        return f"cannot put parts of the keys together ({_parts_reason(needs)})"
    return None


def _problem_of_package(kernel: str, device: Device, needs: Needs) -> str | None:
    if kernel in ("flash3", "flash4"):
        if device.capability < (9, 0):
            return f"needs compute capability 9.0 or more, not {_dotted(device.capability)}"
        if needs.dropout:
            return "has no attention dropout (--attention-dropout)"
    if kernel == "flash4" and needs.deterministic:
        return "is not bitwise reproducible in its backward pass (--deterministic-mode)"
    if needs.parts_of_keys:
        return f"differentiates no log-sum-exp ({_parts_reason(needs)})"
    return None


def _problem_of_te(device: Device, needs: Needs) -> str | None:
    if not device.transformer_engine:
        return "is not installed"
    if needs.deterministic:
        return "is not bitwise reproducible in its backward pass (--deterministic-mode)"
    if needs.parts_of_keys:
        return f"is not used for parts of the keys ({_parts_reason(needs)})"
    return None


def _parts_reason(needs: Needs) -> str:
    return "--softmax-type" if needs.sink else f"--cp-comm-type {needs.context}"


def _reason(request: Request, device: Device, problems: list[str]) -> str:
    if request != "auto":
        text = f"asked for with --attention-backend {request}"
    elif device.type == "cuda":
        text = f"the fastest that fits, compute capability {_dotted(device.capability)}"
    else:
        text = f"the one for {device.type}"
    return "; ".join((text, *(f"{problem}" for problem in problems)))


def _name(backend: Backend, kernel: str) -> str:
    if backend == "flash":
        return f"flash-attn {kernel.removeprefix('flash')}"
    if backend == "te":
        return "Transformer Engine"
    return {
        "cudnn": "cuDNN",
        "flash": "torch's FlashAttention-2",
        "efficient": "torch's efficient",
    }[kernel]


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


# --- on this machine --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selected:
    """A choice and its backend, or the reason why there is none."""

    choice: KernelChoice | None
    backend: AttentionBackend | None
    refusal: str = ""

    def get(self) -> AttentionBackend:
        """The backend; ConfigError if there is none."""
        if self.backend is None:
            raise ConfigError(self.refusal)
        return self.backend


Key = tuple[str, torch.dtype, bool]
"""Type of device, dtype, whether samples are packed documents."""


@lru_cache(maxsize=512)
def backend_table(request: Request, needs: Needs, numerics: Numerics) -> Mapping[Key, Selected]:
    """The backend for every device, dtype and kind of batch that a layer can meet.

    A layer asks when it is built, so that nothing is decided while it runs or is compiled.
    needs: without dtype and documents."""
    types = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        (kind, dtype, documents): _select(
            request,
            probe_device(kind),
            replace(needs, dtype=str(dtype).removeprefix("torch."), documents=documents),
            numerics,
        )
        for kind in types
        for dtype in DTYPES
        for documents in (False, True)
    }


def _select(request: Request, device: Device, needs: Needs, numerics: Numerics) -> Selected:
    try:
        choice = choose_backend(request, device, needs)
    except ConfigError as error:
        return Selected(None, None, str(error))
    return Selected(choice, build_backend(choice, numerics, needs.deterministic))


def build_backend(
    choice: KernelChoice, numerics: Numerics, deterministic: bool
) -> AttentionBackend:
    """The backend of a choice."""
    if choice.backend == "local":
        return LocalBackend(numerics)
    if choice.backend == "flash":
        return FlashBackend(int(choice.kernel.removeprefix("flash")), deterministic)
    if choice.backend == "te":
        return TransformerEngineBackend()
    return SdpaBackend(choice.kernel, choice.strict)


def probe_device(kind: str) -> Device:
    """The current CUDA device and the installed packages."""
    if kind != "cuda":
        return Device("cpu" if kind == "meta" else kind)
    capability = torch.cuda.get_device_capability()
    return Device(
        "cuda",
        capability,
        _flash_attn_version(capability),
        _installed("transformer_engine"),
        apex_norm=_installed("apex") and _installed("fused_layer_norm_cuda"),
        apex_fast_norm=_installed("apex.contrib.layer_norm.layer_norm")
        and any(map(_installed, ("fast_layer_norm", "apex.contrib.layer_norm.fast_layer_norm"))),
    )


def _flash_attn_version(capability: tuple[int, int]) -> int:
    """The newest installed generation that supports the device.

    Generation 4 by its distribution: the package of generation 2 has an early flash_attn.cute, with
    other arguments and without what that imports."""
    if capability >= (9, 0) and _version("flash-attn-4") and _installed("flash_attn.cute"):
        return 4
    if capability[0] == 9 and _installed("flash_attn_interface"):
        return 3
    return 2 if _installed("flash_attn") and _version("flash_attn") == 2 else 0


def _version(distribution: str) -> int | None:
    """Its major version; None: not installed."""
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
