"""How the matrix products of a model use 8-bit floating point (arXiv:2209.05433). Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["e4m3", "hybrid"]
"""e4m3 (4 bits of exponent, 3 of mantissa) everywhere, or e4m3 forward and e5m2 for gradients."""
Recipe = Literal["tensorwise", "delayed", "rowwise", "blockwise"]
"""What a scale comes from: the present maximum of a tensor (tensorwise), its maxima of past steps
(delayed), or the present maximum of a row (rowwise), or of a tile or block (blockwise)."""
Backend = Literal["torch", "transformer_engine"]
"""Whose kernels cast and multiply."""
AmaxAlgorithm = Literal["most_recent", "max"]

ALIGNMENT = 16
"""8-bit products take sizes that are multiples of this."""
TILE = 128
"""Numbers in a row that have a scale with the blockwise recipe; blocks are as high as wide."""


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """The 8-bit numbers of a model's products."""

    format: Format
    scaling: Recipe = "tensorwise"
    margin: int = 0
    """Delayed: the scale leaves room for this many doublings."""
    history_length: int = 1
    """Delayed: steps whose maxima are kept."""
    amax_compute_algo: AmaxAlgorithm = "most_recent"
    """Delayed: which of them counts."""
    backend: Backend = "torch"

    @property
    def alignment(self) -> int:
        """Sizes of matrices are multiples of this."""
        return TILE if self.scaling == "blockwise" else ALIGNMENT

    @property
    def survives_decoding(self) -> bool:
        """Whether weights that are decoded to bf16 are cast to the same values again."""
        return self.scaling in ("tensorwise", "blockwise")
