"""Checks address, key and checkpoint before torch is imported."""

from __future__ import annotations

import os

from stages.serve.config import ServeConfig
from trainyard.conversion.loadable_model import check_model_to_load


def check_inputs(config: ServeConfig) -> None:
    """Refuse an open address without a key, a damaged checkpoint, one without a tokenizer, and a
    model that is not expected."""
    config.listen.api_key(os.environ)
    check_model_to_load(config.load, config.expect, config.layout.parallel())
