"""Attention windows in a config.json of `transformers`."""

from __future__ import annotations

from typing import Any

from trainyard.conversion.fields import Fields
from trainyard.errors import ArtifactError, ConfigError


def tokens_before(width: int, where: str) -> int:
    """The left side of our --window-size, which does not count the token itself, as
    `sliding_window` does."""
    if width < 1:
        raise ArtifactError(f"{where}: sliding_window is {width}")
    return width - 1


def window_of_layers(fields: Fields, width: int | None, where: str) -> dict[str, Any]:
    """A window on the layers that `layer_types` names, or from layer `max_window_layers` on."""
    layers, first = fields.need("num_hidden_layers", int), fields.get("max_window_layers", 28)
    kinds = fields.raw("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ArtifactError(f"{where}: layer_types is {kinds!r:.60}, wanted a list")
    if kinds is None:
        sliding = [width is not None and layer >= first for layer in range(layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
        known = all(kind in ("sliding_attention", "full_attention") for kind in kinds)
        if len(kinds) != layers or not known:
            raise ConfigError(
                f"{where}: layer_types must be full_attention or sliding_attention for each of "
                f"the {layers} layers, got {kinds!r:.60}"
            )
    if not any(sliding):
        return {}
    if width is None:
        raise ArtifactError(f"{where}: layer_types has sliding_attention, but no sliding_window")
    pattern = "[" + ",".join(str(int(item)) for item in sliding) + "]"
    skipping = {} if all(sliding) else {"window_attn_skip_freq": pattern}
    return {"window_size": f"{tokens_before(width, where)},0", **skipping}


# --- ours to theirs ---------------------------------------------------------------------------


def tokens_seen(window: tuple[int, int] | None) -> int | None:
    """`sliding_window`, which counts the token itself; None: no window."""
    return None if window is None or window[0] < 0 else window[0] + 1
