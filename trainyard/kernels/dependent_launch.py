"""Programmatic dependent launch: a kernel starts while the one before ends, fetches what that does
not change, and then waits for it. Parts of kernels; for Hopper GPUs and newer.

Every kernel of a chain waits, so a kernel that has passed `begin` sees the work of all before."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def begin():
    """Let the next kernel start, and wait for the one before."""
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the memory at these addresses, to be in the L2 cache when it is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
