"""The mixer of a Mamba-2 layer (arXiv:2405.21060, section 7): projections, a short convolution, the
state space, a gated norm.

s sequence, b batch, h hidden, g groups, r heads of a group, p channels of a head, n numbers of the
state of a channel; di = g r p. g and di are those of this tensor-parallel rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.attention.layer_state import Inputs, State
from trainyard.attention.masks import AttentionMask, document_numbers
from trainyard.models.attention import KVCache
from trainyard.models.mamba.config import CONV_WIDTH, MambaConfig
from trainyard.models.mamba.conv import causal_conv, last_inputs
from trainyard.models.mamba.fused import SsmKernels, triton_mixer
from trainyard.models.mamba.kernels import backend_on_cuda
from trainyard.models.mamba.scan import chunked_scan, next_state
from trainyard.models.recompute import recomputed
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import Parts, even_shard, mark_shard
from trainyard.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


class MambaMixer(nn.Module):
    """Rows of in_proj are the gate z, then x, B and C, which pass the convolution, then the time
    step of each head. Tensor parallelism shards each of the five between groups, and the rest with
    them."""

    def __init__(self, config: MambaConfig, layer: int, parallel: ModelParallel = ALONE) -> None:
        super().__init__()
        self.layer = layer
        tp, h = parallel.tp_size, config.hidden_size
        sizes = config.projected_sizes
        di, gn = config.inner_size // tp, config.group_size // tp
        self.sizes = (di, di + 2 * gn, config.mamba_heads // tp)
        self.convolved_sizes = (di, gn, gn)
        self.groups, self.head_dim = config.mamba_num_groups // tp, config.mamba_head_dim
        self.dt_min, self.dt_max = config.mamba_dt_min, config.mamba_dt_max
        self.chunk_size, self.backend = config.mamba_chunk_size, backend_on_cuda(config)
        self._ssm = SsmKernels() if self.backend == "mamba_ssm" else None
        self.in_proj = ColumnParallelLinear(
            h, sum(sizes), bias=False, parallel=parallel, parts=sizes
        )
        self.conv1d = ConvParameters(sizes[1:4], parallel)
        self.dt_bias = _shared_out(config.mamba_heads, parallel)
        self.A_log = _shared_out(config.mamba_heads, parallel)
        self.D = _shared_out(config.mamba_heads, parallel)
        self.norm = GatedNorm(config, parallel)
        self.out_proj = RowParallelLinear(config.inner_size, h, bias=False, parallel=parallel)

    def forward(self, x: Tensor, mask: AttentionMask, kv_cache: KVCache | None = None) -> Tensor:
        """x: (s, b, h), (s / tp, b, h) under sequence parallelism. mask: of which only the bounds
        of documents matter: none sees the state of another. kv_cache: has the states of the texts
        that x goes on with, of `MambaConfig.state_shapes`; it needs no mask. Returns a tensor like
        x."""
        projected = self.in_proj(x).transpose(0, 1)
        gate, convolved, dt = projected.split(self.sizes, dim=-1)
        if kv_cache is not None:
            answers = kv_cache.states.through(self.layer, (convolved, dt), self._continued)
            return self._output(self.norm(answers, gate))
        assert mask.dense is None, "a state space knows no mask but the bounds of documents"
        documents = None
        if mask.bounds is not None:
            documents = document_numbers(mask.bounds, gate.shape[1])
        if self.backend == "triton" and projected.is_cuda:
            return self._output(self._mixed_by_triton(projected, documents))
        inputs = (convolved, dt, gate, documents)
        is_plain = self.backend == "torch" or not projected.is_cuda
        if is_plain and torch.is_grad_enabled() and projected.requires_grad:
            # As the paper's kernels do: the decays between the tokens of chunks take many times the
            # memory of what they follow from.
            y: Tensor = recomputed(self._mixed, *inputs, draws=False)
        else:
            y = self._mixed(*inputs)
        return self._output(y)

    def _continued(
        self, inputs: Inputs, state: State, counts: Tensor | None
    ) -> tuple[Tensor, State]:
        """An `Advance`: a prompt or a part of it by the scan, one token by the recurrence. Answers
        are (b, s, di), without the gate."""
        (convolved, dt), (before, ssm) = inputs, state
        if counts is not None:
            padding = torch.arange(convolved.shape[1], device=counts.device) >= counts.unsqueeze(1)
            convolved = convolved.masked_fill(padding.unsqueeze(-1), 0)
        x, b, c = self._heads(
            causal_conv(convolved, self.conv1d.weight, self.conv1d.bias, before=before)
        )
        steps, decay = self._steps(dt), self._decay()
        if counts is not None:
            steps = steps.masked_fill(padding[..., None, None], 0)  # which changes no state
        if x.shape[1] == 1:
            y, ssm = next_state(ssm, x[:, 0], steps[:, 0], decay, b[:, 0], c[:, 0])
            y = y.unsqueeze(1)
        else:
            y, ssm = chunked_scan(x, steps, decay, b, c, self.chunk_size, state=ssm)
        return self._skipped(y, x), (last_inputs(convolved, before, counts), ssm)

    # --- steps --------------------------------------------------------------------------------

    def _mixed_by_triton(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        """(b, s, di), what enters the last projection. projected: (b, s, gate, inputs of the
        convolution and time steps), of the whole sequence."""
        mixed: Tensor = triton_mixer(
            *(projected, self.conv1d.weight, self.conv1d.bias, self.dt_bias, self.A_log, self.D),
            *(self.norm.weight, documents, self.groups, self.head_dim),
            *(self.dt_min, self.dt_max, self.norm.eps),
        )[0]
        return mixed

    def _mixed(
        self, convolved: Tensor, dt: Tensor, gate: Tensor, documents: Tensor | None
    ) -> Tensor:
        """The same. convolved: (b, s, di + 2 g n). dt: (b, s, g r). gate: (b, s, di)."""
        ssm = self._ssm if convolved.is_cuda else None
        conv = ssm.conv if ssm else causal_conv
        x, b, c = self._heads(conv(convolved, self.conv1d.weight, self.conv1d.bias, documents))
        steps, decay = self._steps(dt), self._decay()
        if ssm is not None:
            y: Tensor = ssm.scan(x, steps, decay, b, c, self.chunk_size, documents)
        else:
            y, _ = chunked_scan(x, steps, decay, b, c, self.chunk_size, documents)
        mixed: Tensor = self.norm(self._skipped(y, x), gate)
        return mixed

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (b, s, g, r, p), B and C (b, s, g, n)."""
        x, b, c = convolved.split(self.convolved_sizes, dim=-1)
        x = x.unflatten(-1, (self.groups, -1, self.head_dim))
        return x, b.unflatten(-1, (self.groups, -1)), c.unflatten(-1, (self.groups, -1))

    def _steps(self, dt: Tensor) -> Tensor:
        """(b, s, g, r) fp32 time steps."""
        steps = functional.softplus(dt.float() + self.dt_bias.float())
        if self.dt_min > 0 or self.dt_max is not None:
            steps = steps.clamp(self.dt_min, self.dt_max)
        by_group: Tensor = steps.unflatten(-1, (self.groups, -1))
        return by_group

    def _decay(self) -> Tensor:
        """(g, r) fp32, below 0."""
        rates = torch.exp(self.A_log.float())
        return -rates.view(self.groups, -1)

    def _skipped(self, y: Tensor, x: Tensor) -> Tensor:
        """(b, s, di): the state's answer, and each channel's own input times D."""
        skip = self.D.float().view(self.groups, -1, 1) * x.float()
        return (y.float() + skip).to(x.dtype).flatten(2)

    def _output(self, mixed: Tensor) -> Tensor:
        """(s, b, h) of what the gated norm gives."""
        out: Tensor = self.out_proj(mixed.transpose(0, 1))
        return out


class ConvParameters(nn.Module):
    """weight: (channels, 1, w), bias: (channels), each of x, B and C."""

    def __init__(self, sizes: tuple[int, ...], parallel: ModelParallel) -> None:
        super().__init__()
        self.weight = _shared_out(sum(sizes), parallel, 1, CONV_WIDTH, parts=sizes)
        self.bias = _shared_out(sum(sizes), parallel, parts=sizes)


class GatedNorm(nn.Module):
    """RMSNorm of y silu(gate) over the channels of each group, in fp32. weight: (di)."""

    def __init__(self, config: MambaConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.groups = config.mamba_num_groups // parallel.tp_size
        self.eps = config.norm_epsilon
        self.weight = _shared_out(config.inner_size, parallel)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate: (..., di). Returns the same shape."""
        gated = y.float() * functional.silu(gate.float())
        gated = gated.unflatten(-1, (self.groups, -1))
        normalised: Tensor = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (normalised.flatten(-2) * self.weight.float()).to(self.weight.dtype)


def _shared_out(size: int, parallel: ModelParallel, *rest: int, parts: Parts = 1) -> nn.Parameter:
    """A parameter of (size, *rest), of which each tensor-parallel rank has its rows."""
    parameter = nn.Parameter(torch.empty(size // parallel.tp_size, *rest))
    if parallel.tp is not None:
        whole = (size, *rest)
        mark_shard(parameter, even_shard(whole, 0, parallel.tp_size, parallel.tp_rank, parts))
    return parameter
