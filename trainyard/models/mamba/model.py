"""A Mamba-2 or a hybrid, or the part of it that a pipeline stage holds: a GPT with other layers.

Parameter names are Megatron-LM core's (`decoder.layers.0.mixer.in_proj.weight`), but for norms:
they have the names of a GPT's, and that before a mixer is `pre_mixer_layernorm`."""

from __future__ import annotations

from typing import Any, ClassVar

from trainyard.models.gpt.model import GPTModel
from trainyard.models.mamba.layers import HybridBlock


class MambaModel(GPTModel):
    """A decoder whose layers are Mamba-2, attention, MLPs or experts, as the pattern says."""

    block_class: ClassVar[Any] = HybridBlock
