"""How documents and questions become the samples of a Retro, without their neighbours."""

from __future__ import annotations

from trainyard.datasets.fine_tuning.questions import RETRO_WORDING
from trainyard.datasets.formats import FimFormat, InstructionFormat
from trainyard.datasets.sample_format import SampleFormat
from trainyard.models.family import SampleOptions
from trainyard.models.gpt import samples
from trainyard.models.retro.config import RetroConfig


def sample_format(
    config: RetroConfig, options: SampleOptions
) -> SampleFormat | FimFormat | InstructionFormat:
    """The format that the options describe; questions are asked in InstructRetro's words."""
    return samples.sample_format(config, options, RETRO_WORDING)
