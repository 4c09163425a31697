"""Options of a GPT. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A decoder-only transformer: GPT-2 and GPT-3, Llama, Mistral, Qwen, DeepSeek and similar
    models, with dense MLPs or mixtures of experts such as Mixtral's."""

    mla: LatentConfig = field(default_factory=LatentConfig)
    """Multi-latent attention."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts in place of the MLP."""
    prediction: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction."""

    @property
    def experts(self) -> MoEConfig:
        """Options of mixtures of experts."""
        return self.moe

    @property
    def latent(self) -> LatentConfig:
        """Options of multi-latent attention."""
        return self.mla

    @property
    def mtp(self) -> MTPConfig:
        """Options of multi-token prediction."""
        return self.prediction


def check_own_layers(config: GPTConfig) -> None:
    """Raise ConfigError for options of a GPT's layers, in a family with other layers."""
    given = {
        "--multi-latent-attention": config.latent.enabled,
        "--mtp-num-layers": config.mtp.mtp_num_layers is not None,
    }
    if options := [option for option, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{' and '.join(options)}: --model-type {config.model_type} has no such layers; leave "
            "it out, or train a --model-type gpt"
        )
