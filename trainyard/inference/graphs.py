"""The step of one token, compiled, and on a GPU recorded once and replayed as a CUDA graph.

A step of a small batch launches some ten kernels a layer, each for microseconds: the host is slower
than the device. A graph launches all of them at once, and the compiler fuses what stands between
two matrix products. Shapes are fixed, so a batch of another size, or with more room, is compiled
and recorded anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainyard.attention.masks import as_mask
from trainyard.inference.kv_cache import FixedShapeCache
from trainyard.models.gpt.model import GPTModel
from trainyard.models.layer_inputs import LayerInputs

WARMUP_STEPS = 3
"""Before the recording: compilation, workspaces of libraries."""

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"coordinate_descent_tuning": True}
"""Of the compiler: with it, products of one row become reductions that read their matrix at the
speed of memory, and it looks for the best blocks of each."""


class FixedStep:
    """(b, V) logits of a GPT on one device after the next token of each row."""

    def __init__(self, model: GPTModel, cache: FixedShapeCache, vocab_size: int) -> None:
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._tokens = torch.zeros(len(cache.lengths), 1, dtype=torch.int64, device=model.device)
        self._is_cuda = model.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        options = OPTIONS if self._is_cuda else None
        self._compiled: Callable[[Tensor, LayerInputs], Tensor] = torch.compile(
            self._layers, fullgraph=True, dynamic=False, options=options
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (b) int64. The logits are overwritten by the next call."""
        self._tokens.copy_(tokens.unsqueeze(1))
        self._cache.is_fixed = True
        try:
            if not self._is_cuda:
                logits = self._step()
            else:
                if self._graph is None:
                    self._record()
                assert self._graph is not None
                self._graph.replay()
                assert self._logits is not None
                logits = self._logits
        finally:
            self._cache.is_fixed = False
        self._cache.count_step()
        return logits

    def _step(self) -> Tensor:
        model, cache = self._model, self._cache
        mask, positions = as_mask(cache.mask(1)), cache.positions(1)
        hidden, inputs, _ = model.enter(
            model.decoder, None, self._tokens, mask, position_ids=positions, kv_cache=cache
        )
        logits = self._compiled(hidden, inputs)
        cache.move_on()
        return logits

    def _layers(self, hidden: Tensor, inputs: LayerInputs) -> Tensor:
        """(b, V). hidden: (1, b, h)."""
        out: Tensor = self._model.decoder(hidden, inputs)
        return self._model.logits(out[-1])[:, : self._vocab_size]

    def _record(self) -> None:
        """Record a step; lengths and states are put back, and the next step writes over the keys
        and values of warm-up steps."""
        before = self._cache.copies()
        stream = torch.cuda.Stream(self._tokens.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._step()
                self._cache.put_back(before)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._step()
        self._cache.put_back(before)
