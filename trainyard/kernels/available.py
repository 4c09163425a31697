"""Whether there is Triton, which comes with torch's builds for CUDA; else torch does the work."""

from __future__ import annotations

import importlib.util

TRITON = importlib.util.find_spec("triton") is not None
