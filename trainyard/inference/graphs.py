"""The step of one token, compiled, and on a GPU recorded once and replayed as a CUDA graph.

A step of a small batch launches some ten kernels a layer, each for microseconds: the host is slower
than the device. A graph launches all of them at once, and the compiler fuses what stands between
two matrix products. Shapes are fixed, so a batch of another size, or with more room, is compiled
and recorded anew. The layers of a Llama in bf16 on a data-center GPU from Hopper on are not
compiled: `fused_layers` has kernels for them.

On a CPU the compiler keeps a second copy of the matrices, in the order in which its library
multiplies few rows fastest. So the weights must not change once a step has run. It keeps one copy
for each size of a batch and each room, and frees none of them with its `FixedStep`: so fill up
smaller batches (`padded`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.attention.masks import AttentionMask
from trainyard.inference.fused_layers import FusedLayers, can_fuse
from trainyard.inference.kv_cache import FixedShapeCache
from trainyard.models.gpt.model import GPTModel
from trainyard.models.layer_inputs import LayerInputs
from trainyard.models.rope import Rotary

WARMUP_STEPS = 3
"""Before the recording: compilation, workspaces of libraries."""

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "coordinate_descent_tuning": True,
    "triton.enable_pdl": True,
}
"""Of the compiler on a GPU. With the first, products of one row become reductions that read their
matrix at the speed of memory, and it looks for the best blocks of each. With the second, Hopper
GPUs launch a kernel while the one before ends."""


class _Inputs(NamedTuple):
    """Of the layers."""

    hidden: Tensor
    """(1, b, h)"""
    rotary: Rotary | None
    dense: Tensor
    """(b, 1, 1, capacity)"""
    lengths: Tensor
    """(b) keys that a row sees."""


class FixedStep:
    """(b, V) logits of a GPT on one device after the next token of each row."""

    def __init__(self, model: GPTModel, cache: FixedShapeCache, vocab_size: int) -> None:
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._tokens = torch.zeros(len(cache.lengths), 1, dtype=torch.int64, device=model.device)
        self._is_cuda = model.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        options = OPTIONS if self._is_cuda else None
        compiled = partial(torch.compile, fullgraph=True, dynamic=False, options=options)
        self._inputs: Callable[[Tensor], _Inputs] = compiled(self._tensors)
        self._fused_inputs = compiled(self._hidden_and_rotary)
        self._layers: Callable[[Tensor, LayerInputs], Tensor] = compiled(self._through_layers)
        self._fused: FusedLayers | None = None
        if can_fuse(model, len(cache.lengths)):
            self._fused = FusedLayers(model, cache)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (b) int64. The logits are overwritten by the next call."""
        self._tokens.copy_(tokens.unsqueeze(1))
        self._cache.is_fixed = True
        try:
            if not self._is_cuda:
                from torch._inductor import config as inductor  # a second and a half

                with inductor.patch(freezing=True):
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
        if self._fused is not None:
            inputs = self._fused_inputs(self._tokens)
            logits = self._fused(*inputs)[:, : self._vocab_size]
            self._cache.move_on()
            return logits
        hidden, rotary, dense, lengths = self._inputs(self._tokens)
        mask = AttentionMask(causal=False, dense=dense, lengths=lengths)
        logits = self._layers(hidden, LayerInputs(rotary, mask, self._cache))
        self._cache.move_on()
        return logits

    def _tensors(self, tokens: Tensor) -> _Inputs:
        """What layers take, in two or three kernels. A compiler cannot make `LayerInputs`."""
        model, cache = self._model, self._cache
        positions, dense = cache.positions(1), cache.mask(1)
        assert model.embedding is not None
        assert dense is not None
        hidden = model.dropped_embedding(model.embedding(tokens, positions), None)
        return _Inputs(hidden, model.rotary(model.decoder, positions), dense, positions[:, 0] + 1)

    def _hidden_and_rotary(self, tokens: Tensor) -> tuple[Tensor, Rotary | None, Tensor]:
        """What fused layers take."""
        model, positions = self._model, self._cache.positions(1)
        assert model.embedding is not None
        hidden = model.dropped_embedding(model.embedding(tokens, positions), None)
        return hidden, model.rotary(model.decoder, positions), positions[:, 0]

    def _through_layers(self, hidden: Tensor, inputs: LayerInputs) -> Tensor:
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
