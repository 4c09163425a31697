"""AdamW over the flat memory of a bucket, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard.kernels.adamw import ALIGNMENT, TILE, adamw
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.update import FlatTensors, Spans, UpdateTerms


class FlatAdamW:
    """The update of `rules.AdamW` on flat tensors."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._tiles: dict[Spans, Tensor] = {}

    def update(self, flat: FlatTensors, spans: Spans, terms: UpdateTerms) -> None:
        """One step in place for the numbers in `spans`; writes them to `flat.params` too."""
        config = self._config
        beta1, beta2 = config.adam_beta1, config.adam_beta2
        first, second = flat.moments
        adamw(
            flat.grads,
            flat.main,
            (first, second),
            flat.params,
            self._tiles_of(spans, flat.main.device),
            grad_scale=terms.grad_scale,
            decay=1.0 - terms.learning_rate * terms.weight_decay,
            betas=(beta1, beta2),
            eps=config.adam_eps,
            step_size=terms.learning_rate / (1.0 - beta1**terms.num_updates),
            correction=(1.0 - beta2**terms.num_updates) ** 0.5,
            aligned=all(place % ALIGNMENT == 0 for span in spans for place in span),
        )

    def _tiles_of(self, spans: Spans, device: torch.device) -> Tensor:
        """(n, 2) int64 first place of each tile and the one after its last; made once, as spans
        stay."""
        if spans not in self._tiles:
            pieces = []
            for begin, end in spans:
                starts = torch.arange(begin, end, TILE)
                pieces.append(torch.stack((starts, (starts + TILE).clamp(max=end)), dim=1))
            self._tiles[spans] = torch.cat(pieces).to(device)
        return self._tiles[spans]
