"""Weights in MXFP4, as OpenAI publishes the experts of gpt-oss: read as bfloat16.

A block of 32 numbers along the input has 16 bytes, two numbers of 4 bits in each (the lower half
first), and one scale: number x 2^(scale - 127). A number is e2m1: a sign, 0, 0.5, 1, 1.5, 2, 3, 4
or 6 (OCP Microscaling Formats 1.0, section 5.3.3). bfloat16 has every such product exactly, but for
the smallest scales.

e experts, "in" and "out" channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.lazy_tensors import TheirTensors
from trainyard.errors import ArtifactError

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors of a matrix, whose name is what stands before."""
BYTES, IN_BLOCK = 16, 32
BIAS = 127

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*POSITIVE, *(-number for number in POSITIVE))
"""By their 4 bits."""


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """(e, in, out) bfloat16. blocks: (e, out, in / 32, 16) uint8; scales: (e, out, in / 32)
    uint8."""
    numbers = torch.tensor(NUMBERS, dtype=torch.bfloat16, device=blocks.device)
    exponents = scales.to(torch.int32).unsqueeze(-1) - BIAS
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # (e, out, in / 32, 32)
    made = torch.ldexp(numbers[halves.to(torch.int32)], exponents)
    return made.flatten(-2).transpose(1, 2)


class UnpackedWeights:
    """The tensors of files, with those in MXFP4 under the name of their matrix."""

    def __init__(self, files: TheirTensors, url: str) -> None:
        """Raises ArtifactError for blocks without scales, or of shapes that do not fit."""
        self._files, self._packed = files, set[str]()
        specs = dict(files.specs)
        for name in files.specs:
            if name.endswith(BLOCKS):
                self._add(name.removesuffix(BLOCKS), specs, url)
        self.specs: Mapping[str, TensorSpec] = specs

    def _add(self, name: str, specs: dict[str, TensorSpec], url: str) -> None:
        blocks, scales = specs.pop(name + BLOCKS), specs.pop(name + SCALES, None)
        fits = scales is not None and (blocks.dtype, scales.dtype) == ("U8", "U8")
        if not fits or len(blocks.shape) != 4 or blocks.shape[3] != BYTES:
            raise ArtifactError(
                f"{url}: {name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)}; MXFP4 has bytes "
                f"(experts, out, blocks, {BYTES}), and {SCALES} of them"
            )
        assert scales is not None
        if blocks.shape[:3] != scales.shape:
            raise ArtifactError(
                f"{url}: {name}{SCALES} is {list(scales.shape)}, wanted {list(blocks.shape[:3])}"
            )
        if name in specs:
            raise ArtifactError(f"{url}: has {name} in MXFP4 and as it is; delete one of them")
        experts, out, count = scales.shape
        specs[name] = TensorSpec("BF16", (experts, count * IN_BLOCK, out))
        self._packed.add(name)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        if name not in self._packed:
            return self._files.read(name)
        return unpacked(self._files.read(name + BLOCKS), self._files.read(name + SCALES))

    def close(self) -> None:
        """Close the files."""
        self._files.close()
