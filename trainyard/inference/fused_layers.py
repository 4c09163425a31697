"""The layers of a Llama in a step of one token, as a chain of five kernels a layer on one GPU,
instead of the compiler's dozen.

For steps of few rows, models that have a norm by root mean square, SwiGLU, rotary positions over
whole heads or none, and neither biases nor anything else between their matrices, on one rank. r
rows, h hidden, n query heads, d head channels, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainyard.fp8.weights import E4M3
from trainyard.inference.kv_cache import FixedShapeCache
from trainyard.kernels.available import TRITON
from trainyard.models.attention import SelfAttention
from trainyard.models.block import TransformerLayer
from trainyard.models.gpt.model import GPTModel
from trainyard.models.mlp import MLP
from trainyard.models.norm import LayerNorm, RMSNorm
from trainyard.models.rope import Rotary
from trainyard.models.swiglu import swiglu
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from trainyard.kernels.decode_product import Cast, Rows

Linear = ColumnParallelLinear | RowParallelLinear
Norm = RMSNorm | LayerNorm
Matrix = tuple[Tensor, Tensor | None]
"""And the factors of its rows, if it is of 8 bits."""

MOST_ROWS = 64
"""Of a step that takes as long as reading the weights."""
MULTIPLE = 128
"""Sizes of a matrix that the kernel takes."""
FEW_ROWS = 16
"""Up to which norms are computed by the products behind them."""
GENERATIONS = (9, 10)
"""Hopper and data-center Blackwell, whose blocks have the 227 KiB of shared memory that the tiles
take; other GPUs have 99."""
HEAD_DIMS = (32, 64, 128)
"""Whose keys fit in shared memory, as many as the kernel reads at a time."""


def can_fuse(model: GPTModel, rows: int) -> bool:
    """Whether the kernels do what the model's layers do."""
    config, device = model.config, model.device
    if not TRITON or device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device)[0] not in GENERATIONS:
        return False
    layers = model.decoder.layers.values()
    if not all(_layer_fits(layer) for layer in layers):
        return False
    norms = [m for m in model.decoder.modules() if isinstance(m, RMSNorm)]
    rotary_fits = not config.rotary or (
        config.rotary_dim == config.head_dim and not config.rotates_neighbours
    )
    return (
        rows <= MOST_ROWS
        and model.dtype == torch.bfloat16
        and model.parallel.tp_size == 1
        and model.pipeline_stage.has_embedding
        and model.pipeline_stage.has_output
        and rotary_fits
        and config.head_dim in HEAD_DIMS
        and not config.fp32_residual_connection
        and len(norms) == 2 * len(layers) + 1
        and not any(norm.centred or norm.kernel is not None for norm in norms)
        and _matrix_fits(_output_weight(model)[0])
    )


def _layer_fits(layer: torch.nn.Module) -> bool:
    if type(layer) is not TransformerLayer:
        return False
    attention, mlp = layer.self_attention, layer.mlp
    if type(attention) is not SelfAttention or type(mlp) is not MLP:
        return False
    core = attention.core_attention
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    return (
        attention.q_layernorm is None
        and core.window is None
        and core.softmax_type == "vanilla"
        and mlp.activation is swiglu
        and all(linear.bias is None and _matrix_fits(_matrix(linear)[0]) for linear in linears)
    )


def _matrix_fits(weight: Tensor) -> bool:
    kinds = (torch.bfloat16, torch.float8_e4m3fn)
    return weight.dtype in kinds and all(size % MULTIPLE == 0 for size in weight.shape)


def _matrix(linear: Linear) -> Matrix:
    if linear.quantized is not None:
        return linear.quantized.values, linear.quantized.scale
    return linear.weight, None


def _output_weight(model: GPTModel) -> Matrix:
    if model.output_layer is not None:
        return _matrix(model.output_layer)
    assert model.embedding is not None
    return model.embedding.word_embeddings.weight, None


class FusedLayers:
    """(r, V) logits from (r, h) inputs of the layers; memory for one size of a batch."""

    def __init__(self, model: GPTModel, cache: FixedShapeCache) -> None:
        from trainyard.kernels.decode_attention import DecodeAttention
        from trainyard.kernels.decode_product import CAST_CHANNELS, Meeting

        config, rows, device = model.config, len(cache.lengths), model.device
        self._model, self._cache, self._eps = model, cache, config.norm_epsilon
        keys = cache.of_layer(model.decoder.numbers[0])[0]
        self._attention = DecodeAttention(rows, config.num_attention_heads, keys)
        self._dependent = device.type == "cuda"
        widths = {
            "stream": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": config.query_size + 2 * config.kv_size,
            "context": config.query_size,
            "inner": config.ffn_size,
            "logits": _output_weight(model)[0].shape[0],
        }
        self._meeting = Meeting(rows, max(widths.values()), device)
        self._rows = {
            name: torch.empty(rows, width, dtype=model.dtype, device=device)
            for name, width in widths.items()
        }
        parts = {name: widths[name] // CAST_CHANNELS for name in ("normed", "inner")}
        parts["context"] = keys.shape[1]
        self._cast = {
            name: torch.empty(rows, widths[name], dtype=E4M3, device=device) for name in parts
        }
        self._scale = {
            name: torch.empty(count, rows, device=device) for name, count in parts.items()
        }
        self._squares = torch.empty_like(self._scale["normed"])

    def __call__(self, hidden: Tensor, rotary: Rotary | None, lengths: Tensor) -> Tensor:
        """hidden: (1, r, h); lengths: (r) tokens in the cache before this one. The logits are
        overwritten by the next call."""
        decoder = self._model.decoder
        turn = None
        if rotary is not None:
            shape = (len(lengths), self._model.config.head_dim)
            cos, sin = (x[0, :, 0].expand(shape).contiguous() for x in rotary[:2])
            turn = (cos, sin)
        layers = list(decoder.layers.values())
        assert decoder.final_layernorm is not None
        output = (decoder.final_layernorm, _output_weight(self._model))
        rows = self._enter(hidden[0], *_first_of(layers[0]))
        for index, (number, layer) in enumerate(zip(decoder.numbers, layers, strict=True)):
            assert isinstance(layer, TransformerLayer)
            attention, mlp = layer.self_attention, layer.mlp
            assert isinstance(attention, SelfAttention)
            assert isinstance(mlp, MLP)
            self._multiply(rows, _matrix(attention.linear_qkv), self._rows["qkv"])
            context = self._attend(number, attention, turn, lengths)
            fc1, fc2 = _matrix(mlp.linear_fc1), _matrix(mlp.linear_fc2)
            norm = layer.pre_mlp_layernorm
            rows = self._onto_stream(context, _matrix(attention.linear_proj), norm, fc1)
            inner = self._inner(rows, fc1, fc2)
            is_last = index + 1 == len(layers)
            after = output if is_last else _first_of(layers[index + 1])
            rows = self._onto_stream(inner, fc2, *after)
        self._multiply(rows, output[1], self._rows["logits"])
        return self._rows["logits"]

    def _enter(self, hidden: Tensor, norm: Norm, matrix: Matrix) -> Rows:
        """The first rows of the residual stream, as the first matrix takes them."""
        from trainyard.kernels.row_norm import cast_rows

        self._rows["stream"].copy_(hidden)
        cast = self._cast_of(norm, matrix)
        if cast is not None:
            cast_rows(self._rows["stream"], cast, dependent=self._dependent)
        return self._normed(norm, cast)

    def _cast_of(self, norm: Norm, matrix: Matrix) -> Cast | None:
        """Where the stream goes for a matrix of 8 bits behind a norm."""
        from trainyard.kernels.decode_product import Cast

        if matrix[1] is None:
            return None
        return Cast(self._cast["normed"], self._scale["normed"], norm.weight, self._squares)

    def _normed(self, norm: Norm, cast: Cast | None) -> Rows:
        """The stream behind a norm, as the next matrix takes it."""
        from trainyard.kernels.decode_product import Rows
        from trainyard.kernels.row_norm import row_norm

        stream = self._rows["stream"]
        if cast is not None:
            return cast.rows(self._eps)
        if len(stream) <= FEW_ROWS:
            return Rows(stream, gain=norm.weight, eps=self._eps)
        normed, dependent = self._rows["normed"], self._dependent
        row_norm(stream, norm.weight, normed, eps=self._eps, dependent=dependent)
        return Rows(normed)

    def _attend(
        self,
        number: int,
        attention: SelfAttention,
        turn: tuple[Tensor, Tensor] | None,
        lengths: Tensor,
    ) -> Rows:
        """The context, as the projection takes it."""
        from trainyard.kernels.decode_product import Rows

        casts = _matrix(attention.linear_proj)[1] is not None
        rows = Rows(self._rows["context"])
        if casts:
            rows = Rows(self._cast["context"], self._scale["context"])
        self._attention(
            *(self._rows["qkv"], turn, *self._cache.of_layer(number), lengths, rows.values),
            scale=attention.core_attention.scale,
            out_scale=rows.scale,
            dependent=self._dependent,
        )
        return rows

    def _inner(self, rows: Rows, fc1: Matrix, fc2: Matrix) -> Rows:
        """The output of SwiGLU, as the next matrix takes it."""
        from trainyard.kernels.decode_product import Cast, Rows

        if fc2[1] is None:
            self._multiply(rows, fc1, self._rows["inner"], gated=True)
            return Rows(self._rows["inner"])
        cast = Cast(self._cast["inner"], self._scale["inner"])
        self._multiply(rows, fc1, None, gated=True, cast=cast)
        return cast.rows()

    def _onto_stream(self, rows: Rows, matrix: Matrix, norm: Norm, following: Matrix) -> Rows:
        """Add a product to the stream, and give that as the matrix behind the next norm takes
        it."""
        stream, cast = self._rows["stream"], self._cast_of(norm, following)
        self._multiply(rows, matrix, stream, residual=stream, cast=cast)
        return self._normed(norm, cast)

    def _multiply(
        self,
        rows: Rows,
        matrix: Matrix,
        out: Tensor | None,
        *,
        residual: Tensor | None = None,
        gated: bool = False,
        cast: Cast | None = None,
    ) -> None:
        from trainyard.kernels.decode_product import decode_product

        weight, scale = matrix
        decode_product(
            *(rows, weight, out),
            scale=scale,
            residual=residual,
            gated=gated,
            cast=cast,
            meeting=self._meeting,
            dependent=self._dependent,
        )


def _first_of(layer: torch.nn.Module) -> tuple[Norm, Matrix]:
    """What a layer does with the stream first."""
    assert isinstance(layer, TransformerLayer)
    assert isinstance(layer.self_attention, SelfAttention)
    return layer.input_layernorm, _matrix(layer.self_attention.linear_qkv)
