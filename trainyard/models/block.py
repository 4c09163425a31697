"""One transformer layer, and the layers of a stage with the final norm.

s sequence (this rank's part of it), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.models.attention import SelfAttention
from trainyard.models.config import TransformerConfig
from trainyard.models.cross_attention import CrossAttention
from trainyard.models.latent_attention import build_attention
from trainyard.models.layer_inputs import DropoutPlaces, LayerInputs
from trainyard.models.mlp import MLP
from trainyard.models.moe.layer import build_mlp
from trainyard.models.norm import build_norm, forked
from trainyard.models.offload import ActivationOffload
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.recompute import layer_groups, recomputed, recomputed_norm
from trainyard.parallel.invariant_dropout import DropoutPlace, cut_free_dropout
from trainyard.parallel.model import ALONE, ModelParallel

Step = tuple[nn.Module, DropoutPlace | None]
"""A layer and the place of its dropout."""

AFTER_ATTENTION, AFTER_MLP, AFTER_CROSS_ATTENTION = 0, 1, 2
"""Numbers of the dropouts of a layer."""


class TransformerLayer(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)), dropout on each branch."""

    def __init__(
        self, config: TransformerConfig, layer: int, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.recompute_norms = config.recomputes("layernorm")
        self.recompute_mlp = config.recomputes("mlp")
        self.input_layernorm = build_norm(config, parallel)
        self.self_attention = build_attention(config, layer, parallel)
        self.pre_mlp_layernorm = build_norm(config, parallel)
        self.mlp = build_mlp(config, layer, parallel)

    def forward(self, x: Tensor, inputs: LayerInputs, place: DropoutPlace | None = None) -> Tensor:
        """x: (s, b, h). place: of dropout; None disables it. Returns (s, b, h)."""
        x, branch = self._attention(x, inputs)
        x = x + dropped(branch, self.dropout, place, AFTER_ATTENTION)
        x, branch = self._mlp(x)
        return x + dropped(branch, self.dropout, place, AFTER_MLP)

    def _attention(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The residual stream, and what is added to it."""

        def attend(normalised: Tensor) -> Tensor:
            out: Tensor = self.self_attention(
                normalised, inputs.rotary, inputs.mask, inputs.kv_cache, inputs.bias
            )
            return out

        if self._recomputes_norms():
            return x, recomputed_norm(self.input_layernorm, attend, x)
        x, normalised = forked(self.input_layernorm, x)
        return x, attend(normalised)

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `_attention`."""
        if self.recompute_mlp and self.training:
            return x, recomputed(self._norm_and_mlp, x, draws=False)
        if self._recomputes_norms():
            return x, recomputed_norm(self.pre_mlp_layernorm, self.mlp, x)
        x, normalised = forked(self.pre_mlp_layernorm, x)
        return x, self.mlp(normalised)

    def _norm_and_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.pre_mlp_layernorm(x))
        return out

    def _recomputes_norms(self) -> bool:
        """Under torch.compile the compiler decides about recomputing norms."""
        return self.recompute_norms and self.training and not torch.compiler.is_compiling()


class DecoderLayer(TransformerLayer):
    """As `TransformerLayer`, with x + cross_attention(norm(x), source) before the MLP."""

    def __init__(
        self, config: TransformerConfig, layer: int, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__(config, layer, parallel)
        self.pre_cross_attn_layernorm = build_norm(config, parallel)
        self.cross_attention = CrossAttention(config, layer, parallel)

    def forward(self, x: Tensor, inputs: LayerInputs, place: DropoutPlace | None = None) -> Tensor:
        """x: (s, b, h). place: of dropout; None disables it. Returns (s, b, h)."""
        x, branch = self._attention(x, inputs)
        x = x + dropped(branch, self.dropout, place, AFTER_ATTENTION)
        x, branch = self._across(x, inputs)
        x = x + dropped(branch, self.dropout, place, AFTER_CROSS_ATTENTION)
        x, branch = self._mlp(x)
        return x + dropped(branch, self.dropout, place, AFTER_MLP)

    def _across(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """As `_attention`."""
        source = inputs.source
        assert source is not None, "a decoder needs the output of its encoder"

        def attend(normalised: Tensor) -> Tensor:
            out: Tensor = self.cross_attention(
                normalised, source, inputs.source_mask, inputs.source_cache
            )
            return out

        if self._recomputes_norms():
            return x, recomputed_norm(self.pre_cross_attn_layernorm, attend, x)
        x, normalised = forked(self.pre_cross_attn_layernorm, x)
        return x, attend(normalised)


class PostNormLayer(nn.Module):
    """Post-norm, as in the first transformers (arXiv:1706.03762): norm(x + attention(x)), then
    norm(x + mlp(x)), dropout on each branch."""

    def __init__(
        self, config: TransformerConfig, layer: int, parallel: ModelParallel = ALONE
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.recompute_mlp = config.recomputes("mlp")
        self.self_attention = SelfAttention(config, layer, parallel)
        self.post_attention_layernorm = build_norm(config, parallel)
        self.mlp = MLP(config, parallel)
        self.post_mlp_layernorm = build_norm(config, parallel)

    def forward(self, x: Tensor, inputs: LayerInputs, place: DropoutPlace | None = None) -> Tensor:
        """x: (s, b, h). place: of dropout; None disables it. Returns (s, b, h)."""
        branch = self.self_attention(x, inputs.rotary, inputs.mask, inputs.kv_cache)
        x = self.post_attention_layernorm(x + dropped(branch, self.dropout, place, AFTER_ATTENTION))
        if self.recompute_mlp and self.training:
            branch = recomputed(self.mlp, x, draws=False)
        else:
            branch = self.mlp(x)
        out: Tensor = self.post_mlp_layernorm(x + dropped(branch, self.dropout, place, AFTER_MLP))
        return out


def dropped(branch: Tensor, p: float, place: DropoutPlace | None, use: int) -> Tensor:
    """A branch before it is added to the residual stream. place: None disables dropout."""
    return branch if place is None else cut_free_dropout(branch, p, place, use)


class TransformerBlock(nn.Module):
    """The layers of a stage, named by their numbers in the whole model, and the final norm on the
    last stage; post-norm layers have none."""

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ModelParallel = ALONE,
        pipeline_stage: PipelineStage = WHOLE,
        *,
        post_norm: bool = False,
        num_layers: int | None = None,
        layer: Callable[[Any, int, ModelParallel], nn.Module] = TransformerLayer,
    ) -> None:
        """num_layers: of the block in the whole model; unset: --num-layers. layer: builds one, from
        (config, number, parallel)."""
        super().__init__()
        self.config = config
        self.total = config.num_layers if num_layers is None else num_layers
        self.numbers = pipeline_stage.layer_numbers(self.total)
        make = PostNormLayer if post_norm else layer
        self.layers = nn.ModuleDict(
            {str(number): make(config, number, parallel) for number in self.numbers}
        )
        has_norm = pipeline_stage.has_output and not post_norm
        self.final_layernorm = build_norm(config, parallel) if has_norm else None

    def forward(
        self, x: Tensor, inputs: LayerInputs, places: DropoutPlaces | None = None
    ) -> Tensor:
        """x: (s, b, h). places: of dropout; None disables it. Returns (s, b, h), normalised on the
        last stage."""
        out: Tensor = self.normalised(self.through_layers(x, inputs, places))
        return out

    def normalised(self, x: Tensor) -> Tensor:
        """x after the final norm, if this stage has it."""
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def through_layers(self, state: Any, inputs: LayerInputs, places: DropoutPlaces | None) -> Any:
        """`state`, what `run` takes from layer to layer, after all layers of this stage."""
        steps = [
            (layer, None if places is None else places.of_layer(number))
            for number, layer in zip(self.numbers, self.layers.values(), strict=True)
        ]
        if self.training and torch.is_grad_enabled():
            return self._trained(state, inputs, steps)
        return self.run(steps, state, inputs)

    def run(self, steps: Sequence[Step], state: Any, inputs: LayerInputs) -> Any:
        """The state after these layers: here the residual stream (s, b, h) alone."""
        for layer, place in steps:
            state = layer(state, inputs, place)
        return state

    def _trained(self, state: Any, inputs: LayerInputs, steps: Sequence[Step]) -> Any:
        """Forward pass of training, with recomputation and offloading."""
        config, left = self.config, self.config.cpu_offloading_num_layers
        offload = ActivationOffload(state.device) if left else None
        for group, again in layer_groups(config, steps):
            if again:
                state = recomputed(self.run, group, state, inputs, draws=self.draws)
            elif offload is not None and left:
                left -= 1
                with offload.around_layer(group[0][0], inputs.tensors()):
                    state = self.run(group, state, inputs)
            else:
                state = self.run(group, state, inputs)
        return state

    @property
    def draws(self) -> bool:
        """Whether a layer draws from torch's generators."""
        return self.config.attention_dropout > 0
