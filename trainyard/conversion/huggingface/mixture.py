"""The experts of Mixtral and Qwen3-MoE in a config.json of `transformers`."""

from __future__ import annotations

from typing import Any

from trainyard.conversion.fields import Fields
from trainyard.conversion.huggingface.architecture import MIXTRAL, QWEN3_MOE
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.moe_config import MoEConfig


def read_mixture(fields: Fields, name: str, where: str) -> dict[str, MoEConfig]:
    """The experts of Mixtral or Qwen3-MoE."""
    if name not in (MIXTRAL, QWEN3_MOE):
        return {}
    layers = fields.need("num_hidden_layers", int)
    fields.must_be("router_jitter_noise", 0.0)
    aux = fields.get("router_aux_loss_coef", 0.001)
    if name == MIXTRAL:
        own: dict[str, Any] = {
            "num_experts": fields.get("num_local_experts", 8),
            "moe_router_topk": fields.get("num_experts_per_tok", 2),
        }
    else:
        own = _qwen_mixture(fields, layers, where)
    try:
        return {"moe": MoEConfig(moe_aux_loss_coeff=aux, **own)}
    except ConfigError as error:
        raise ArtifactError(f"{where} describes experts that cannot be built: {error}") from error


def _qwen_mixture(fields: Fields, layers: int, where: str) -> dict[str, Any]:
    """Every `decoder_sparse_step`th layer has experts, those of `mlp_only_layers` have none."""
    step, dense = fields.get("decoder_sparse_step", 1), fields.raw("mlp_only_layers") or []
    if step < 1 or not isinstance(dense, list):
        raise ArtifactError(f"{where}: decoder_sparse_step {step}, mlp_only_layers {dense!r:.60}")
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    pattern = "[" + ",".join(str(int(item)) for item in sparse) + "]"
    found = fields.maybe("num_experts", int), fields.maybe("num_local_experts", int)
    return {
        "num_experts": found[0] or found[1] or 128,
        "moe_layer_freq": "1" if all(sparse) else pattern,
        "moe_router_topk": fields.get("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": fields.get("moe_intermediate_size", 768),
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", False),
    }
