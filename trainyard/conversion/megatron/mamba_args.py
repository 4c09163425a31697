"""Converts Megatron-LM's arguments of hybrid models to our options, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.artifacts.strict_json import shown
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.pattern import STAGE

SPEC = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
"""--spec of Megatron-LM's scripts."""

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""The argument of newer and of older releases."""

SAME_NAME = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
"""Fields of MambaConfig that are arguments of the same name and meaning."""

RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")

OF_HYBRIDS = ("spec", *PATTERNS, *RATIOS, "is_hybrid_model")
"""Arguments that only a hybrid may have."""


def hybrid_values(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of a MambaConfig. Releases before 0.10 have no arguments for sizes, and the defaults
    of later ones."""
    if args.get("spec") not in (None, [], SPEC):
        raise ConfigError(
            f"{where}: is a model with --spec {shown(args['spec'])}; this version of trainyard "
            f"computes only {' '.join(SPEC)}"
        )
    found = {name: args[name] for name in SAME_NAME if args.get(name) is not None}
    found |= {name: float(args[name]) for name in RATIOS if type(args.get(name)) in (int, float)}
    if args.get("is_hybrid_model"):
        found["is_hybrid_model"] = True
    pattern = next((args[name] for name in PATTERNS if args.get(name)), None)
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) > MAX_LAYERS:
            raise ArtifactError(f"{where}: {PATTERNS[0]} {shown(pattern)} describes no layers")
        found[PATTERNS[0]] = pattern.replace(STAGE, "")  # the stages of the run that saved it
    return {"model_type": "mamba", **found}


def hybrid_args(config: MambaConfig) -> dict[str, Any]:
    """The arguments of a hybrid, its layers letter by letter."""
    if config.mamba_dt_min or config.mamba_dt_max is not None:
        raise ConfigError(
            "Megatron-LM has no arguments for --mamba-dt-min and --mamba-dt-max; use --saver hf, "
            "or keep the checkpoint in our format (--saver trainyard)"
        )
    return {
        **{name: getattr(config, name) for name in SAME_NAME},
        **dict.fromkeys(PATTERNS, config.layer_kinds),
        **dict.fromkeys(RATIOS, 0.0),
        "is_hybrid_model": config.is_hybrid_model,
        "spec": SPEC,
    }
