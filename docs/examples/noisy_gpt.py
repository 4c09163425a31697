"""A GPT whose training batches have some tokens replaced, by an option of this program."""

from dataclasses import dataclass

import torch

from stages.pretrain.program import program
from trainyard.api import pretrain


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Train a GPT on noisy text."""

    noise: float = 0.1
    """Share of the input tokens that are replaced by random ones."""


def main(config, options):
    def forward_step(module, hidden, batch):
        if module.training and module.pipeline_stage.has_embedding:
            tokens = batch["tokens"]
            chosen = torch.rand(tokens.shape, device=tokens.device) < options.noise
            others = torch.randint_like(tokens, int(tokens.max()) + 1)
            batch = {**batch, "tokens": torch.where(chosen, others, tokens)}
        return module.forward_step(hidden, batch)

    pretrain(None, None, config, forward_step=forward_step)


raise SystemExit(program(main, NoiseOptions))
