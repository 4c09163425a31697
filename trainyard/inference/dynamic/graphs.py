"""The step of one token of each request at a few fixed numbers of requests, recorded on a GPU as
CUDA graphs.

The layers are compiled once for all numbers of requests. A step is padded to the next recorded
number; the rows of padding write to the cache's scratch block and slot, and look at these alone.
Tables are as wide as the longest request needs, and are read as far as a request is long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainyard.attention.masks import as_mask
from trainyard.attention.paged import PagedLayout
from trainyard.attention.paged_cache import PagedKVCache
from trainyard.attention.slot_states import StateGroup
from trainyard.inference.dynamic.batch import StepBatch
from trainyard.inference.graphs import WARMUP_STEPS
from trainyard.models.gpt.model import GPTModel
from trainyard.models.layer_inputs import LayerInputs

log = logging.getLogger(__name__)

COLUMNS = 6
"""Numbers of a request in the row of a step, beside its table."""

MULTIPLE = 8
"""Rows that products like."""


def graph_sizes(num_graphs: int, max_requests: int) -> list[int]:
    """Numbers of requests, evenly spread up to the most."""
    step = -(-max_requests // num_graphs)
    step = -(-step // MULTIPLE) * MULTIPLE
    return [*range(step, max_requests, step), max_requests]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step of this many requests. The inputs are views of one row, which is copied at once."""

    row: Tensor
    """int64: tokens, positions, blocks, places, lengths, slots, tables."""
    tokens: Tensor
    layout: PagedLayout
    states: StateGroup
    logits: Tensor | None
    graph: torch.cuda.CUDAGraph | None


class DecodeGraphs:
    """(R, V) logits of steps of one token of each of up to a number of requests, on one device."""

    def __init__(
        self,
        model: GPTModel,
        cache: PagedKVCache,
        vocab_size: int,
        sizes: list[int],
        most_tokens: int,
        *,
        compiled: bool = True,
    ) -> None:
        """sizes: numbers of requests, ascending. most_tokens: of a request."""
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._sizes, self._most_tokens = sizes, most_tokens
        self._width = -(-most_tokens // cache.block_size)
        self._scratch_slot = 0 if cache.states.is_empty else cache.states.scratch
        self._is_cuda = model.device.type == "cuda"
        self._compiled: Callable[[Tensor, LayerInputs], Tensor] = self._layers
        if compiled:
            self._compiled = torch.compile(self._layers, fullgraph=True, dynamic=True)
            # The compiler takes sizes that are equal at first, such as 256 requests and blocks of
            # 256 tokens, for equal always, unless it knows that one of them never changes.
            for kept in (*cache.tensors(), *cache.states.tensors()):
                torch._dynamo.mark_static(kept)
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._recorded: dict[int, _Recorded] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Record all sizes, the largest first, whose memory the others use too. On a GPU the first
        one compiles the layers, which takes a minute or more for a large model."""
        for size in reversed(self._sizes):
            began = time.monotonic()
            self._recorded[size] = self._record(size)
            log.info("step ready requests=%d seconds=%.1f", size, time.monotonic() - began)

    def takes(self, batch: StepBatch) -> bool:
        """Whether a step is of the recorded kind."""
        return batch.is_decode and len(batch.counts) <= self._sizes[-1]

    def __call__(self, batch: StepBatch) -> Tensor:
        """The logits are overwritten by the next call."""
        count = len(batch.counts)
        size = next(size for size in self._sizes if size >= count)
        recorded = self._recorded[size]
        row = torch.from_numpy(self._padded(batch, size))
        if self._is_cuda:
            recorded.row.copy_(row.pin_memory(), non_blocking=True)
        else:
            recorded.row.copy_(row)
        if recorded.graph is None:
            logits = self._step(recorded.tokens, recorded.layout, recorded.states)
        else:
            recorded.graph.replay()
            assert recorded.logits is not None
            logits = recorded.logits
        return logits[:count]

    def _padded(self, batch: StepBatch, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The row of a step; padding has one token, in the scratch block and slot."""
        count, width, scratch = len(batch.counts), self._width, self._cache.scratch
        row = np.zeros(size * (COLUMNS + width), np.int64)
        columns = row[: COLUMNS * size].reshape(COLUMNS, size)
        tables = row[COLUMNS * size :].reshape(size, width)
        columns[2, count:] = scratch
        columns[4, count:] = 1
        columns[5, count:] = self._scratch_slot
        tables[count:] = scratch
        columns[0, :count] = batch.tokens
        columns[1:4, :count] = batch.places(self._cache.block_size)
        columns[4, :count] = batch.lengths
        columns[5, :count] = batch.slots
        tables[:count, : batch.tables.shape[1]] = batch.tables
        return row

    def _record(self, size: int) -> _Recorded:
        device, width = self._model.device, self._width
        row = torch.zeros(size * (COLUMNS + width), dtype=torch.int64, device=device)
        columns = row[: COLUMNS * size].view(COLUMNS, size)
        columns[2] = self._cache.scratch
        columns[4] = 1
        columns[5] = self._scratch_slot
        tables = row[COLUMNS * size :].view(size, width)
        tables.fill_(self._cache.scratch)
        torch._dynamo.mark_static(tables, 1)
        layout = PagedLayout(
            positions=columns[1].unsqueeze(0),
            blocks=columns[2],
            places=columns[3],
            tables=tables,
            starts=torch.arange(size + 1, device=device),
            lengths=columns[4],
            most_new=1,
            most_keys=self._most_tokens,
        )
        tokens, states = columns[0].unsqueeze(0), StateGroup(columns[5])
        if not self._is_cuda:
            return _Recorded(row, tokens, layout, states, None, None)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._step(tokens, layout, states)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._step(tokens, layout, states)
        return _Recorded(row, tokens, layout, states, logits, graph)

    def _step(self, tokens: Tensor, layout: PagedLayout, states: StateGroup) -> Tensor:
        """(b, V)."""
        model, cache = self._model, self._cache
        cache.layout, cache.states.groups = layout, [states]
        hidden, inputs, _ = model.enter(
            model.decoder,
            None,
            tokens,
            as_mask(None),
            position_ids=layout.positions,
            kv_cache=cache,
        )
        return self._compiled(hidden, inputs)

    def _layers(self, hidden: Tensor, inputs: LayerInputs) -> Tensor:
        """(b, V). hidden: (b, 1, h), a token of each request behind one another."""
        out: Tensor = self._model.decoder(hidden, inputs)
        return self._model.logits(out[:, 0])[:, : self._vocab_size]
