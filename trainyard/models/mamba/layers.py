"""Layers of a hybrid, each of one kind: norm, mixer, residual.

s sequence (this rank's part of it), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainyard.models.attention import SelfAttention
from trainyard.models.block import AFTER_ATTENTION, TransformerBlock, dropped
from trainyard.models.layer_inputs import LayerInputs
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.mixer import MambaMixer
from trainyard.models.mamba.pattern import ATTENTION, EXPERTS, MAMBA, MLP
from trainyard.models.moe.layer import build_mlp
from trainyard.models.norm import build_norm, forked
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.recompute import recomputed, recomputed_norm
from trainyard.parallel.invariant_dropout import DropoutPlace
from trainyard.parallel.model import ALONE, ModelParallel


class _Layer(nn.Module):
    """x + branch(norm(x)), dropout on the branch."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.recompute_norm = config.recomputes("layernorm")

    def _added(
        self,
        x: Tensor,
        norm: nn.Module,
        branch: Callable[[Tensor], Tensor],
        place: DropoutPlace | None,
    ) -> Tensor:
        # Under torch.compile the compiler decides about recomputing norms.
        if self.recompute_norm and self.training and not torch.compiler.is_compiling():
            out = recomputed_norm(norm, branch, x)
        else:
            x, normalised = forked(norm, x)
            out = branch(normalised)
        return x + dropped(out, self.dropout, place, AFTER_ATTENTION)


class MambaLayer(_Layer):
    """A Mamba-2 mixer."""

    def __init__(self, config: MambaConfig, layer: int, parallel: ModelParallel = ALONE) -> None:
        super().__init__(config)
        self.pre_mixer_layernorm = build_norm(config, parallel)
        self.mixer = MambaMixer(config, layer, parallel)

    def forward(self, x: Tensor, inputs: LayerInputs, place: DropoutPlace | None = None) -> Tensor:
        """x: (s, b, h). place: of dropout; None disables it. Returns (s, b, h)."""

        def mix(normalised: Tensor) -> Tensor:
            out: Tensor = self.mixer(normalised, inputs.mask, inputs.kv_cache)
            return out

        return self._added(x, self.pre_mixer_layernorm, mix, place)


class AttentionLayer(_Layer):
    """Self-attention alone."""

    def __init__(self, config: MambaConfig, layer: int, parallel: ModelParallel = ALONE) -> None:
        super().__init__(config)
        self.input_layernorm = build_norm(config, parallel)
        self.self_attention = SelfAttention(config, layer, parallel)

    def forward(self, x: Tensor, inputs: LayerInputs, place: DropoutPlace | None = None) -> Tensor:
        """x: (s, b, h). place: of dropout; None disables it. Returns (s, b, h)."""

        def attend(normalised: Tensor) -> Tensor:
            out: Tensor = self.self_attention(
                normalised, inputs.rotary, inputs.mask, inputs.kv_cache, inputs.bias
            )
            return out

        return self._added(x, self.input_layernorm, attend, place)


class MLPLayer(_Layer):
    """An MLP alone, or a mixture of experts."""

    def __init__(self, config: MambaConfig, layer: int, parallel: ModelParallel = ALONE) -> None:
        super().__init__(config)
        self.recompute_mlp = config.recomputes("mlp")
        self.pre_mlp_layernorm = build_norm(config, parallel)
        self.mlp = build_mlp(config, layer, parallel)

    def forward(self, x: Tensor, inputs: LayerInputs, place: DropoutPlace | None = None) -> Tensor:
        """x: (s, b, h). place: of dropout; None disables it. Returns (s, b, h)."""
        if self.recompute_mlp and self.training:
            branch = recomputed(self._norm_and_mlp, x, draws=False)
            return x + dropped(branch, self.dropout, place, AFTER_ATTENTION)
        return self._added(x, self.pre_mlp_layernorm, self.mlp, place)

    def _norm_and_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.pre_mlp_layernorm(x))
        return out


LAYERS: dict[str, Callable[[MambaConfig, int, ModelParallel], nn.Module]] = {
    MAMBA: MambaLayer,
    ATTENTION: AttentionLayer,
    MLP: MLPLayer,
    EXPERTS: MLPLayer,
}


def build_layer(config: MambaConfig, layer: int, parallel: ModelParallel) -> nn.Module:
    """Layer `layer`, counted from 0 over the whole model, of the kind that its letter names."""
    return LAYERS[config.layer_kinds[layer]](config, layer, parallel)


class HybridBlock(TransformerBlock):
    """The layers of a stage, and the final norm on the last."""

    def __init__(
        self,
        config: MambaConfig,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
    ) -> None:
        super().__init__(config, parallel, pipeline_stage, layer=build_layer)
