"""Options that several formats of others write in the same words."""

from __future__ import annotations

from typing import Any

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Three names of `transformers` for one function; the last multiplies in another order."""


def grouped_queries(kv_heads: int, heads: int) -> dict[str, Any]:
    """Our options for a number of key and value heads; 0: as many as query heads."""
    if kv_heads in (0, heads):
        return {}
    return {"group_query_attention": True, "num_query_groups": kv_heads}
