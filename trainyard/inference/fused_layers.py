"""The layers of a Llama in a step of one token, as a chain of five kernels a layer on one GPU,
instead of the compiler's dozen.

For steps of few rows, models that have a norm by root mean square, SwiGLU, rotary positions over
whole heads or none, and neither biases nor anything else between their matrices, on one rank. r
rows, h hidden, n query heads, d head channels, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from trainyard.kernels.decode_product import Rows

Linear = ColumnParallelLinear | RowParallelLinear
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
        from trainyard.kernels.decode_product import Meeting

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
        cast = ("normed", "context", "inner")
        self._cast = {
            name: torch.empty(rows, widths[name], dtype=E4M3, device=device) for name in cast
        }
        self._scale = {name: torch.empty(rows, 1, device=device) for name in ("normed", "inner")}
        self._scale["context"] = torch.empty(rows, keys.shape[1], device=device)

    def __call__(self, hidden: Tensor, rotary: Rotary | None, lengths: Tensor) -> Tensor:
        """hidden: (1, r, h); lengths: (r) tokens in the cache before this one. The logits are
        overwritten by the next call."""
        decoder = self._model.decoder
        self._rows["stream"].copy_(hidden[0])
        turn = None
        if rotary is not None:
            shape = (len(lengths), self._model.config.head_dim)
            cos, sin = (x[0, :, 0].expand(shape).contiguous() for x in rotary[:2])
            turn = (cos, sin)
        for number, layer in zip(decoder.numbers, decoder.layers.values(), strict=True):
            assert isinstance(layer, TransformerLayer)
            attention, mlp = layer.self_attention, layer.mlp
            assert isinstance(attention, SelfAttention)
            assert isinstance(mlp, MLP)
            self._after_norm(layer.input_layernorm, _matrix(attention.linear_qkv), "qkv")
            self._onto_stream(self._attend(number, attention, turn, lengths), attention.linear_proj)
            fc1 = _matrix(mlp.linear_fc1)
            self._after_norm(layer.pre_mlp_layernorm, fc1, "inner", gated=True)
            self._onto_stream(self._inner(mlp.linear_fc2), mlp.linear_fc2)
        assert decoder.final_layernorm is not None
        self._after_norm(decoder.final_layernorm, _output_weight(self._model), "logits")
        return self._rows["logits"]

    def _after_norm(
        self, norm: RMSNorm | LayerNorm, matrix: Matrix, out: str, *, gated: bool = False
    ) -> None:
        """The residual stream, normalised, times a matrix."""
        from trainyard.kernels.decode_product import Rows
        from trainyard.kernels.row_norm import row_norm

        stream, scale = self._rows["stream"], self._scale["normed"]
        options: dict[str, Any] = {"gain": norm.weight, "eps": self._eps}
        if matrix[1] is not None:
            rows = Rows(self._cast["normed"], scale)
            row_norm(stream, rows.values, scale=scale, **options, dependent=self._dependent)
        elif len(stream) <= FEW_ROWS:
            rows = Rows(stream, **options)
        else:
            rows = Rows(self._rows["normed"])
            row_norm(stream, rows.values, **options, dependent=self._dependent)
        self._multiply(rows, matrix, self._rows[out], gated=gated)

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

    def _inner(self, linear: Linear) -> Rows:
        """The output of SwiGLU, as the next matrix takes it."""
        from trainyard.kernels.decode_product import Rows
        from trainyard.kernels.row_norm import row_norm

        if _matrix(linear)[1] is None:
            return Rows(self._rows["inner"])
        rows = Rows(self._cast["inner"], self._scale["inner"])
        row_norm(self._rows["inner"], rows.values, scale=rows.scale, dependent=self._dependent)
        return rows

    def _onto_stream(self, rows: Rows, linear: Linear) -> None:
        stream = self._rows["stream"]
        self._multiply(rows, _matrix(linear), stream, residual=stream)

    def _multiply(
        self,
        rows: Rows,
        matrix: Matrix,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        from trainyard.kernels.decode_product import decode_product

        weight, scale = matrix
        decode_product(
            *(rows, weight, out),
            scale=scale,
            residual=residual,
            gated=gated,
            meeting=self._meeting,
            dependent=self._dependent,
        )
