"""As `resolve`, for stages.finetune, which takes options of its checkpoint without being asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.pretrain.checkpoint_options import complete
from stages.pretrain.resolve import resolved

__all__ = ["beneath", "resolved"]


def beneath(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(options that those given override, no remarks). Raises ConfigError without a checkpoint."""
    return {name: value for name, value in complete(given).items() if name not in given}, []
