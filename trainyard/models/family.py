"""What code outside `models/` needs to know about a family of models. Standard library only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.datasets.config import DataConfig
from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.fine_tuning.config import SftConfig
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.layer_sums import LayerSums
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.retrieval.shape import NeighborShape


@dataclass(frozen=True, slots=True)
class FlopConvention:
    """What a figure of TFLOP/s or MFU counts."""

    name: str
    """Printed beside the figure."""
    meaning: str
    """One line that explains it."""


PER_PARAMETER = FlopConvention("6N", "6 for each parameter and token, attention and recompute not")
"""For a model of which only the size is known."""
GIVEN = FlopConvention("flops_per_token", "operations of a token as the program gave them")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """What decides how text becomes samples, beside the model."""

    data: DataConfig
    masked: MaskedConfig
    fim: FimConfig
    sft: SftConfig
    tokenizer: Any
    """A `tokenizers.base.Tokenizer`."""
    seed: int


def no_losses(config: Any) -> tuple[str, ...]:
    """Of a family that has only the loss of each token."""
    return ()


def no_sums(config: Any) -> LayerSums | None:
    """Of a family whose layers add nothing up."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A kind of model: its options, its samples, its module, its costs.

    Functions take (config, padded vocabulary size, ...), with a config of the family's class."""

    config: type[TransformerConfig]
    module: str
    """MODULE:CLASS; a string, since options and plans are read without torch.

    The class takes (config, padded_vocab_size, ModelParallel, PipelineStage, vocab_size) and is an
    nn.Module with `forward_step`, `config` and `pipeline_stage`; its parameters are unfilled."""
    sample_format: str
    """MODULE:FUNCTION of (config, SampleOptions), which returns one of the formats of
    `datasets.formats`."""
    of_sentences: bool = False
    """Samples are runs of sentences with hidden words and padding (--mask-prob), not pieces of
    documents; no rank has a part of one."""
    predicts_next: bool = False
    """It predicts the next token, so that texts have a perplexity."""
    generates: bool = False
    """It writes texts token by token, with what it keeps of the tokens before."""
    neighbor_shape: Callable[[Any], NeighborShape] | None = None
    """(config) -> what a sample retrieves, where samples are those of a GPT with neighbours of
    their chunks (--retro-db); no rank has a part of one."""
    fitted_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other families whose weights --finetune takes, each with patterns of the names of those that
    it lacks, which get initial values."""
    more_losses: Callable[[Any], tuple[str, ...]] = no_losses
    """(config) -> names of the losses of `models.losses.Losses.means`."""
    layer_sums: Callable[[Any], LayerSums | None] = no_sums
    """(config) -> what its layers add up over a step."""
    kernels: str = ""
    """MODULE:FUNCTION of (config, device, say=...) for kernels of its own: raises ConfigError for
    one that is not available, and logs the choice if say is true. Empty: there are none."""
    flops_per_iteration: Callable[[Any, int, int], float]
    """Operations of a step of this many samples, forward and backward."""
    flop_convention: FlopConvention
    shard_params: Callable[[Any, int, ParallelLayout], float]
    """Parameters of the most loaded rank."""
    activation_bytes: Callable[[Any, int, ParallelLayout], float]
    """Activations of the most loaded rank in 16 bits, recomputation considered."""

    @property
    def of_documents(self) -> bool:
        """Whether samples are pieces of documents and nothing else."""
        return not self.of_sentences and self.neighbor_shape is None

    def load_class(self) -> Any:
        """The nn.Module class."""
        return _load(self.module)

    def report_kernels(self, config: Any, device: Any, *, say: bool) -> None:
        """Check and log the kernels of its own."""
        if self.kernels:
            _load(self.kernels)(config, device, say=say)

    def build_format(self, config: Any, options: SampleOptions) -> Any:
        """How text becomes samples: one of the formats of `datasets.formats`."""
        return _load(self.sample_format)(config, options)


def _load(what: str) -> Any:
    module, _, name = what.partition(":")
    return getattr(importlib.import_module(module), name)
