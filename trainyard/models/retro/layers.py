"""Layers with cross attention: of the decoder to the neighbours of its chunks, and of the encoder
of neighbours to the chunk that they are neighbours of.

Parameter names and arithmetic are those of Megatron-LM core's Retro. The first of the decoder's
layers holds the encoder, whose source is the normalised input of its cross attention.

s sequence, b batch, l chunks, m tokens of a chunk, k neighbours, r tokens of a neighbour, h hidden;
s and r are the part on this rank under sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainyard.attention.masks import FULL, AttentionMask
from trainyard.models.block import (
    AFTER_ATTENTION,
    AFTER_CROSS_ATTENTION,
    AFTER_MLP,
    TransformerLayer,
    dropped,
)
from trainyard.models.config import TransformerConfig
from trainyard.models.cross_attention import CrossAttention
from trainyard.models.layer_inputs import DropoutPlaces, LayerInputs
from trainyard.models.norm import build_norm
from trainyard.models.retro.chunks import (
    chunked,
    of_rows,
    shifted_chunks,
    to_rows,
    unshifted,
)
from trainyard.models.retro.config import RetroConfig
from trainyard.parallel.invariant_dropout import DropoutPlace
from trainyard.parallel.model import ALONE, ModelParallel


@dataclass(frozen=True, slots=True)
class NeighborInputs:
    """What layers of a Retro know of the neighbours, beside their hidden states."""

    num_chunks: int
    """Chunks with neighbours (l)."""
    own: LayerInputs
    """Of the layers of the encoder: each neighbour sees its own tokens. Built outside of compiled
    layers."""
    retrieved: AttentionMask
    """Of the tokens of a chunk to its neighbours."""
    sees_any: Tensor
    """(s, b, 1) bool: whether a token has any neighbour. Where not, cross attention adds
    nothing."""
    dropout: DropoutPlaces | None = None
    """Of the encoder; None disables it."""


class WithNeighbors(NamedTuple):
    """The residual stream of a sample and of its neighbours."""

    hidden: Tensor
    """(s, b, h)."""
    neighbors: Tensor
    """(r, b l k, h), embedded up to the layer with the encoder, then encoded."""
    about: NeighborInputs


class RetroLayer(TransformerLayer):
    """A layer of the decoder with chunked cross attention between self-attention and MLP."""

    def __init__(self, config: RetroConfig, layer: int, parallel: ModelParallel = ALONE) -> None:
        super().__init__(config, layer, parallel)
        self.gate = config.retro_attention_gate
        self.pre_cross_attn_layernorm = build_norm(config, parallel)
        has_encoder = layer == config.cross_layers[0]
        self.cross_attention = ChunkedCrossAttention(config, layer, parallel, has_encoder)
        _move_to_end(self, "pre_mlp_layernorm", "mlp")

    def forward(
        self, x: Tensor | WithNeighbors, inputs: LayerInputs, place: DropoutPlace | None = None
    ) -> Any:
        """x: (s, b, h), alone or with neighbours. Returns the same kind, neighbours encoded."""
        if isinstance(x, Tensor):
            return super().forward(x, inputs, place)
        hidden, neighbors, about = x
        hidden, branch = self._attention(hidden, inputs)
        hidden = hidden + dropped(branch, self.dropout, place, AFTER_ATTENTION)
        normalised = self.pre_cross_attn_layernorm(hidden)
        branch, neighbors = self.cross_attention(normalised, neighbors, about)
        branch = dropped(branch, self.dropout, place, AFTER_CROSS_ATTENTION)
        if self.gate != 1.0:
            branch = self.gate * branch
        hidden = hidden + torch.where(about.sees_any, branch, 0.0)
        hidden, branch = self._mlp(hidden)
        hidden = hidden + dropped(branch, self.dropout, place, AFTER_MLP)
        return WithNeighbors(hidden, neighbors, about)


class ChunkedCrossAttention(nn.Module):
    """Tokens attend to the encoded neighbours of the chunk that ends before them, or with them."""

    def __init__(
        self, config: RetroConfig, layer: int, parallel: ModelParallel, has_encoder: bool
    ) -> None:
        super().__init__()
        self.chunk_length = config.retro_chunk_length
        self.num_neighbors = config.retro_num_neighbors
        self.attn = CrossAttention(config, layer, parallel)
        self.encoder = NeighborEncoder(config, parallel) if has_encoder else None

    def forward(self, x: Tensor, neighbors: Tensor, about: NeighborInputs) -> tuple[Tensor, Tensor]:
        """x: (s, b, h), normalised. Returns the branch, a tensor like x, and encoded neighbours."""
        if self.encoder is not None:
            neighbors = self.encoder(neighbors, x, about)
        length, attn = self.chunk_length, self.attn
        q = attn.queries(x)  # (s, b, n, d), s whole from here on
        s, b = q.shape[:2]
        k, v = attn.keys_and_values(neighbors.to(attn.linear_kv.weight.dtype))
        context = attn.attend(
            shifted_chunks(q, about.num_chunks, length),
            of_rows(k, self.num_neighbors),
            of_rows(v, self.num_neighbors),
            about.retrieved,
        )
        return attn.output(unshifted(context, b, length, s)), neighbors


class NeighborEncoder(nn.Module):
    """A few layers in both directions over the tokens of each neighbour, without a final norm. In
    the first, neighbours attend to their chunk."""

    def __init__(self, config: RetroConfig, parallel: ModelParallel) -> None:
        super().__init__()
        options = config.encoder()
        self.layers = nn.ModuleDict({"0": EncoderLayer(options, config, parallel)})
        for number in range(1, config.retro_encoder_layers):
            self.layers[str(number)] = TransformerLayer(options, number, parallel)

    def forward(self, neighbors: Tensor, source: Tensor, about: NeighborInputs) -> Tensor:
        """neighbors: (r, b l k, h), embedded. source: (s, b, h), what the chunks attend with.
        Returns a tensor like `neighbors`."""
        for number, layer in enumerate(self.layers.values()):
            place = None if about.dropout is None else about.dropout.of_layer(number)
            if isinstance(layer, EncoderLayer):
                neighbors = layer(neighbors, about.own, place, source, about.num_chunks)
            else:
                neighbors = layer(neighbors, about.own, place)
        return neighbors


class EncoderLayer(TransformerLayer):
    """A layer of the encoder whose neighbours attend to their chunk."""

    def __init__(
        self, options: TransformerConfig, config: RetroConfig, parallel: ModelParallel
    ) -> None:
        """options: of the encoder's layers."""
        super().__init__(options, 0, parallel)
        self.num_neighbors, self.chunk_length = (
            config.retro_num_neighbors,
            config.retro_chunk_length,
        )
        self.pre_cross_attn_layernorm = build_norm(options, parallel)
        self.cross_attention = NeighborCrossAttention(options, parallel)
        self.pre_mlp_layernorm = NeighborNorm(options, parallel)  # type: ignore[assignment]
        _move_to_end(self, "pre_mlp_layernorm", "mlp")

    def forward(
        self,
        x: Tensor,
        inputs: LayerInputs,
        place: DropoutPlace | None = None,
        source: Tensor | None = None,
        num_chunks: int = 0,
    ) -> Tensor:
        """x: (r, b l k, h). source: (s, b, h), with this many chunks first. Returns a tensor like
        x."""
        assert source is not None
        x, branch = self._attention(x, inputs)
        x = x + dropped(branch, self.dropout, place, AFTER_ATTENTION)
        # In Megatron-LM what is normalised also goes on as the residual stream.
        x = self.pre_cross_attn_layernorm(x)
        attn = self.cross_attention.attn
        k, v = (
            chunked(part[: num_chunks * self.chunk_length], num_chunks)
            for part in attn.keys_and_values(source)
        )
        q = of_rows(attn.queries(x), self.num_neighbors)  # (k r, b l, n, d)
        branch = attn.output(to_rows(attn.attend(q, k, v, FULL), self.num_neighbors))
        x = x + dropped(branch, self.dropout, place, AFTER_CROSS_ATTENTION)
        x, branch = self._mlp(x)
        return x + dropped(branch, self.dropout, place, AFTER_MLP)


class NeighborCrossAttention(nn.Module):
    """Holds the cross attention of the encoder under Megatron-LM's name, `cross_attention.attn`."""

    def __init__(self, options: TransformerConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.attn = CrossAttention(options, 0, parallel)


class NeighborNorm(nn.Module):
    """The norm before the MLP of the encoder's first layer, under Megatron-LM's name of it,
    `pre_mlp_layernorm.norm`."""

    def __init__(self, options: TransformerConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.norm = build_norm(options, parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., h). Returns the same shape."""
        out: Tensor = self.norm(x)
        return out


def _move_to_end(module: nn.Module, *names: str) -> None:
    """Register children in the order of their use, in which gradients and parameters travel."""
    for name in names:
        module._modules[name] = module._modules.pop(name)
