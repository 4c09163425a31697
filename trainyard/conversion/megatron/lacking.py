"""Models that Megatron-LM does not compute: what a conversion to its formats refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.retro.config import EARLY, RetroConfig
from trainyard.models.t5.config import T5Config

log = logging.getLogger(__name__)


def refuse_for_megatron(config: TransformerConfig, pp: int) -> None:
    """Refuse a BERT, T5 or Retro that Megatron-LM does not compute. pp: pipeline ranks to write."""
    if isinstance(config, RetroConfig):
        _refuse_retro(config, pp)
    if isinstance(config, T5Config):
        _refuse_t5(config, pp)
    if config.position_embedding_type == "yarn" and isinstance(config, MambaConfig):
        raise ConfigError(
            "Megatron-LM's hybrids have no --position-embedding-type yarn; use --saver trainyard"
        )
    if not isinstance(config, BertConfig):
        return
    if config.post_layernorm:
        raise ConfigError(
            "Megatron-LM's BERT has no --post-layernorm; use --saver hf, or keep the checkpoint in "
            "our format (--saver trainyard)"
        )
    types = 2 if config.bert_binary_head else 0
    if config.token_types != types:
        raise ConfigError(
            f"--num-tokentypes must be {types} for Megatron-LM's BERT "
            f"{'with' if types else 'without'} a binary head, got {config.token_types}; use "
            "--saver trainyard"
        )


def warn_of_norm(config: TransformerConfig) -> None:
    """Warn about releases of Megatron core that omit a norm of a Retro."""
    if isinstance(config, RetroConfig) and not config.retro_no_final_layernorm:
        log.warning(
            "Megatron core 0.8 and later have no norm after the last layer of a Retro: they leave "
            "decoder.final_layernorm out, and compute something else; load it with 0.7, or train "
            "with --retro-no-final-layernorm"
        )


def _refuse_t5(config: T5Config, pp: int) -> None:
    tied = not config.untie_embeddings_and_output_weights
    lacking = {
        "--relu": config.relu,
        "--geglu": config.geglu,
        "--scale-lm-head-input": config.scale_lm_head_input,
        "--no-lm-head-bias": tied and not config.has_output_bias,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        "--qk-layernorm": config.qk_layernorm,
    }
    if found := [option for option, given in lacking.items() if given]:
        raise ConfigError(
            f"Megatron-LM's T5 has no {', '.join(found)}; use --saver hf, or keep the checkpoint "
            "in our format (--saver trainyard)"
        )
    if config.decoder_layers != config.num_layers:
        raise ConfigError(
            f"Megatron-LM's T5 has as many layers in the decoder ({config.decoder_layers}) as in "
            f"the encoder ({config.num_layers}); use --saver trainyard"
        )
    _refuse_stages("T5", pp)


def _refuse_retro(config: RetroConfig, pp: int) -> None:
    others = config.num_layers < EARLY or (
        config.cross_layers != replace(config, retro_cross_attention_layers=()).cross_layers
    )
    lacking = {
        "--retro-cross-attention-layers but every third from 6 (from 9 above 15 layers)": others,
        "--retro-attention-gate": config.retro_attention_gate != 1.0,
        "--group-query-attention": config.query_groups != config.num_attention_heads,
        "--qk-layernorm": config.qk_layernorm,
        "--multi-latent-attention": config.latent.enabled,
        "--mtp-num-layers": config.mtp.mtp_num_layers is not None,
        "--softmax-type": config.softmax_type != "vanilla",
        "--window-size": config.window_size is not None,
    }
    if found := [option for option, given in lacking.items() if given]:
        raise ConfigError(
            f"Megatron-LM's Retro has no {', '.join(found)}; keep the checkpoint in our format "
            "(--saver trainyard)"
        )
    _refuse_stages("Retro", pp)


def _refuse_stages(family: str, pp: int) -> None:
    if pp > 1:
        raise ConfigError(
            f"--target-pipeline-parallel-size {pp}: Megatron-LM's {family} has one pipeline stage; "
            "give 1, or leave the option out"
        )


LEGACY_LACKS: dict[str, Callable[[TransformerConfig], bool]] = {
    "--num-experts": lambda config: config.experts.enabled,
    "--multi-latent-attention": lambda config: config.latent.enabled,
    "--mtp-num-layers": lambda config: config.mtp.mtp_num_layers is not None,
    "--qk-layernorm": lambda config: config.qk_layernorm,
    "--qk-l2-norm": lambda config: config.qk_l2_norm,
    "--softmax-type": lambda config: config.softmax_type != "vanilla",
    "--window-size": lambda config: config.window_size is not None,
    "--quick-geglu": lambda config: config.quick_geglu,
    "--use-rope-scaling": lambda config: config.use_rope_scaling,
    "Retro": lambda config: isinstance(config, RetroConfig),
    "Mamba layers": lambda config: isinstance(config, MambaConfig),
    "--position-embedding-type yarn, relative or none": lambda config: (
        config.position_embedding_type in ("yarn", "relative", "none")
    ),
    "--softmax-scale": lambda config: getattr(config, "softmax_scale", None) is not None,
    "T5 with --untie-embeddings-and-output-weights or rope": lambda config: (
        isinstance(config, T5Config)
        and (
            config.untie_embeddings_and_output_weights
            or config.position_embedding_type != "learned_absolute"
        )
    ),
}


def refuse_for_legacy(config: TransformerConfig) -> None:
    """Refuse a model that Megatron-LM's legacy class does not compute."""
    lacking = [option for option, given in LEGACY_LACKS.items() if given(config)]
    if lacking:
        raise ConfigError(
            f"the legacy model class of Megatron-LM has no {', '.join(lacking)}; use --saver core"
        )
