"""A dense GPT as the start of a mixture of experts: sparse upcycling (arXiv:2212.05055).

Every expert begins as a copy of the layer's MLP, and the router is drawn as for a new model. The
weights of the chosen experts sum to 1, so the model computes at first what the dense one does. The
state of the optimizer and the step are left out: training starts over from these weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.file import DTYPES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.source import Source, generation_of, model_shapes
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.init import draw_parameter
from trainyard.models.moe_config import MoEConfig

ROUTER = ".mlp.router."
EXPERTS = ".mlp.experts."


class Upcycled(Closing):
    """A source with experts; `close` closes the dense one."""

    step = 0
    consumed_train_samples = 0
    num_updates = 0

    def __init__(self, source: Source, moe: MoEConfig, seed: int) -> None:
        """moe: the experts, whose width must be that of the MLP. seed: of the router's weights.
        Raises ConfigError for a model that is no dense GPT."""
        config = source.config
        if type(config) is not GPTConfig or config.experts.enabled:
            kind = "a GPT with experts" if config.experts.enabled else f"a {config.model_type}"
            raise ConfigError(
                f"{source.url} holds {kind}, and only a dense GPT can be upcycled; leave "
                "--upcycle-num-experts out"
            )
        self._source, self._seed = source, seed
        self.url, self.generation = source.url, generation_of(source)
        self.padded_vocab_size, self.vocab_size = source.padded_vocab_size, source.vocab_size
        self.config = replace(config, moe=moe)
        dense = source.specs
        dtype = dense["model.embedding.word_embeddings.weight"].dtype
        self.specs: Mapping[str, TensorSpec] = {
            f"model.{name}": TensorSpec(dtype if is_new(name) else dense[origin(name)].dtype, shape)
            for name, shape in model_shapes(self.config, self.padded_vocab_size).items()
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        spec, own = self.specs[name], name.removeprefix("model.")
        if is_new(own):
            drawn = draw_parameter(own, torch.Size(spec.shape), self.config, self._seed)
            return drawn.to(DTYPES[spec.dtype])
        found = self._source.read(origin(own))
        return found.expand(spec.shape).contiguous() if EXPERTS in own else found

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Those of the dense model."""
        return self._source.tokenizer_files()

    def close(self) -> None:
        """Close the files."""
        self._source.close()


def is_new(name: str) -> bool:
    """Whether the dense model has no such weight."""
    return ROUTER in name


def origin(name: str) -> str:
    """The dense model's tensor that a weight is made of."""
    return "model." + name.replace(EXPERTS, ".mlp.")
