"""Weights in 8 bits: in the layout `compressed-tensors`, which vLLM and `transformers` load, or for
int8 under the configuration of ModelOpt, which TensorRT-LLM loads.

    fp8   format "float-quantized": X.weight float8_e4m3fn (out, in), X.weight_scale
    int8  format "pack-quantized":  X.weight_packed int32 (out, in / 4), X.weight_scale,
                                    X.weight_shape int64 (2), the shape before packing
    int8  ModelOpt's "W8A16":       X.weight int8 (out, in), X.weight_scale (out)

weight = number x scale. A scale is (out, 1), of each output channel, or (1), of the whole matrix;
it has the number format of the weight before, which what reads the folder computes in. Scales map
the largest magnitude to the largest number, so they need no data. Four numbers of 8 bits are packed
into 32, the first one into the lowest bits, each as number + 128. With fp8, inputs are cast too,
each token with a scale of its own while the model runs. Embeddings, norms and the output layer stay
as they are. TensorRT-LLM reorders numbers for its kernels while it loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainyard.checkpoint.safetensors.file import DTYPES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.huggingface.architecture import LLAMA, MISTRAL, QWEN2, QWEN3
from trainyard.conversion.huggingface.to_hf import Target
from trainyard.conversion.lazy_tensors import TheirTensors
from trainyard.errors import ArtifactError, ConfigError

Method = Literal["fp8", "int8"]
Strategy = Literal["channel", "tensor"]
Layout = Literal["compressed-tensors", "modelopt"]

FORMATS: dict[Method, str] = {"fp8": "float-quantized", "int8": "pack-quantized"}
FP8 = torch.float8_e4m3fn
LARGEST: dict[Method, float] = {"fp8": torch.finfo(FP8).max, "int8": 127.0}
OFFSET = 128
IN_WORD = 4
"""Numbers of 8 bits in 32."""

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where TensorRT-LLM looks for the algorithm, before config.json."""
MODELOPT_INT8 = "W8A16"
IN_ROWS, OUT_ROWS = 16, 8
"""What divides the inputs and outputs of a matrix that TensorRT-LLM reorders
(`preprocess_weights_for_mixed_gemm`)."""

WEIGHT, PACKED, SCALE, SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"

ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
"""Classes whose matrices, but for the embeddings, are all named ..._proj."""

LINEAR = "_proj.weight"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a model are stored."""

    method: Method
    strategy: Strategy = "channel"
    layout: Layout = "compressed-tensors"

    def __post_init__(self) -> None:
        """Refuse what no loader reads."""
        if self.method == "int8" and self.strategy != "channel":
            raise ConfigError(
                "int8 weights have a scale for each output channel; give --strategy channel"
            )
        if self.method == "fp8" and self.layout != "compressed-tensors":
            raise ConfigError(f"--layout {self.layout} is of int8 weights; give --method int8")

    @property
    def endings(self) -> tuple[str, ...]:
        """Of the names of the tensors that store a matrix."""
        if self.method == "fp8" or self.layout == "modelopt":
            return WEIGHT, SCALE
        return PACKED, SCALE, SHAPE

    def targets(self, wanted: Sequence[Target], architecture: str) -> list[Target]:
        """Every tensor of the folder, the parts of one matrix after each other. ConfigError for a
        class whose matrices loaders know by other names."""
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                f"a {architecture} is not quantized: of {', '.join(ARCHITECTURES)} alone the "
                "matrices have the names that loaders of 8-bit weights expect; export it with "
                "stages.reshard"
            )
        return [part for target in wanted for part in self._parts(target)]

    def _parts(self, target: Target) -> list[Target]:
        if not target.name.endswith(LINEAR):
            return [target]
        stem = target.name.removesuffix(WEIGHT)

        def part(ending: str) -> Target:
            return Target(
                stem + ending,
                target.source,
                lambda ours: self.quantized(target.convert(ours))[ending],
            )

        return [part(ending) for ending in self.endings]

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors of a matrix (out, in), by the endings of their names."""
        largest = LARGEST[self.method]
        exact = weight.float()
        amax = exact.abs().amax(dim=1, keepdim=True) if self.strategy == "channel" else None
        amax = exact.abs().amax().reshape(1) if amax is None else amax
        # A channel of zeros keeps its zeros, at any scale.
        scale = (amax / largest).clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
        numbers = (exact / scale.float()).clamp(-largest, largest)
        if self.method == "fp8":
            return {WEIGHT: numbers.to(FP8), SCALE: scale}
        whole = numbers.round().to(torch.int8)
        if self.layout == "modelopt":
            check_reordered(weight)
            return {WEIGHT: whole, SCALE: scale.flatten()}
        return {PACKED: pack(whole), SCALE: scale, SHAPE: torch.tensor(weight.shape)}

    def document(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        if self.layout == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": MODELOPT_INT8, "ignore": ["lm_head"]}
        common = {"num_bits": 8, "symmetric": True, "group_size": None, "block_structure": None}
        kind = "float" if self.method == "fp8" else "int"
        weights = {**common, "type": kind, "strategy": self.strategy, "dynamic": False}
        inputs = {**common, "type": "float", "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": {**weights, "observer": "minmax"},
            "input_activations": inputs if self.method == "fp8" else None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": FORMATS[self.method],
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def modelopt_document() -> dict[str, Any]:
    """hf_quant_config.json of int8 weights."""
    return {
        "quantization": {
            "quant_algo": MODELOPT_INT8,
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head"],
        }
    }


def check_reordered(weight: Tensor) -> None:
    """ConfigError for a matrix (out, in) whose numbers TensorRT-LLM cannot reorder."""
    out, size = weight.shape
    if out % OUT_ROWS or size % IN_ROWS:
        raise ConfigError(
            f"a matrix of {out} outputs and {size} inputs is not stored with --layout modelopt: "
            f"TensorRT-LLM takes multiples of {OUT_ROWS} and {IN_ROWS}; use --method fp8 without "
            "--layout"
        )


def pack(numbers: Tensor) -> Tensor:
    """(out, in / 4) int32 of (out, in) int8. ConfigError if 4 does not divide `in`."""
    out, size = numbers.shape
    if size % IN_WORD:
        raise ConfigError(
            f"a matrix of {size} inputs is not stored in int8: loaders take multiples of "
            f"{IN_WORD}; use --method fp8"
        )
    unsigned = (numbers.to(torch.int32) + OFFSET).view(out, size // IN_WORD, IN_WORD)
    words = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=numbers.device)
    for place in range(IN_WORD):
        words |= unsigned[..., place] << (8 * place)
    return words


def unpack(words: Tensor) -> Tensor:
    """(out, in) int8 of (out, in / 4) int32."""
    places = torch.arange(IN_WORD, dtype=torch.int32) * 8
    unsigned = (words.unsqueeze(-1) >> places) & 0xFF
    return (unsigned - OFFSET).to(torch.int8).flatten(-2)


# --- reading ----------------------------------------------------------------------------------


def read_quantization(document: Any, where: str) -> Quantization | None:
    """That of a config.json, or None for weights as they are. ConfigError for one that this module
    does not write."""
    found: Any = document.get("quantization_config") if isinstance(document, dict) else None
    if isinstance(found, dict) and found.get("quant_method") == "modelopt":
        algorithm = found.get("quant_algo")
        if algorithm != MODELOPT_INT8:
            raise ConfigError(
                f"{where}: ModelOpt's {algorithm!r:.40} is not read, only {MODELOPT_INT8}; "
                "convert the model before it is quantized"
            )
        return Quantization("int8", "channel", "modelopt")
    if not isinstance(found, dict) or found.get("quant_method") != "compressed-tensors":
        return None
    groups = found.get("config_groups")
    group: Any = next(iter(groups.values())) if isinstance(groups, dict) and groups else None
    weights: Any = group.get("weights") if isinstance(group, dict) else None
    methods = [method for method, name in FORMATS.items() if name == found.get("format")]
    is_one = isinstance(groups, dict) and len(groups) == 1 and isinstance(weights, dict)
    if (
        not is_one
        or not methods
        or weights.get("num_bits") != 8
        or weights.get("symmetric") is not True
    ):
        raise ConfigError(
            f"{where}: quantization_config is not one that is read here: one group of matrices "
            "with 8 bits, symmetric, as float-quantized or pack-quantized; convert it with "
            "transformers"
        )
    if weights.get("strategy") not in ("channel", "tensor"):
        raise ConfigError(
            f"{where}: scales are by {weights.get('strategy')!r:.40}, and only those of a channel "
            "or a whole matrix are read; convert it with transformers"
        )
    return Quantization(methods[0], weights["strategy"])


class DequantizedWeights:
    """The tensors of files, with quantized matrices as number x scale under their own names."""

    def __init__(self, files: TheirTensors, url: str) -> None:
        """Raises ArtifactError for numbers without scales, or scales that do not fit."""
        self._files = files
        self._stored: dict[str, str] = {}
        """Name of the numbers, by that of the matrix."""
        specs = dict(files.specs)
        for name, spec in files.specs.items():
            if name.endswith(PACKED) or spec.dtype in ("F8_E4M3", "I8"):
                self._add(name, specs, url)
        self.specs: Mapping[str, TensorSpec] = specs

    def _add(self, stored: str, specs: dict[str, TensorSpec], url: str) -> None:
        is_packed = stored.endswith(PACKED)
        stem = stored.removesuffix(PACKED if is_packed else WEIGHT)
        numbers, scale = specs.pop(stored), specs.pop(stem + SCALE, None)
        specs.pop(stem + SHAPE, None)
        if len(numbers.shape) != 2 or (is_packed and numbers.dtype != "I32"):
            raise ArtifactError(
                f"{url}: {stored} is {numbers.dtype} {list(numbers.shape)}, no matrix of 8 bits"
            )
        out, size = numbers.shape
        fits = scale is not None and scale.shape in ((out, 1), (out,), (1,), ())
        if not fits or scale is None or scale.dtype not in ("F32", "BF16", "F16"):
            raise ArtifactError(f"{url}: {stem}{SCALE} does not fit to {stored}, or is missing")
        if stem + WEIGHT in specs:
            raise ArtifactError(f"{url}: has {stem}{WEIGHT} twice; delete one of them")
        shape = (out, size * IN_WORD if is_packed else size)
        specs[stem + WEIGHT] = TensorSpec(scale.dtype, shape)
        self._stored[stem + WEIGHT] = stored

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        if name not in self._stored:
            return self._files.read(name)
        stored, scale = self._stored[name], self._files.read(name.removesuffix(WEIGHT) + SCALE)
        numbers = self._files.read(stored)
        if stored.endswith(PACKED):
            numbers = unpack(numbers)
        scales = scale.float().reshape(-1, 1)
        return (numbers.float() * scales).to(DTYPES[self.specs[name].dtype])

    def close(self) -> None:
        """Close the files."""
        self._files.close()
