"""Options that all stages have: of all stages, and of commands in Megatron-LM's spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that every stage has."""

    config: str | None = None
    """TOML, YAML or JSON document of options (path or URL); flags override it."""
    dry_run: bool = False
    """Print the resolved options as a document that --config reads back, and stop."""
    force: bool = False
    """Run even if the output is up to date."""
    claim_wait_seconds: float = 60.0
    """How long to wait for another run that is writing the same output."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to show."""
    debug: bool = False
    """Show the traceback of an error."""
    version: bool = False
    """Print the version and stop."""


@dataclass(frozen=True, kw_only=True)
class YamlOptions:
    """The file of options of Megatron-LM's programs that know a whole run."""

    yaml_cfg: str | None = None
    """Megatron-LM's YAML file of options (path or URL), flat or in sections; flags override it."""


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(YamlOptions):
    """Options of Megatron-LM and of guides to it that are not options of a training."""

    world_size: int | None = None
    """Number of ranks: those of the launcher, or those to start on this machine."""
    init_method: str | None = None
    """tcp://HOST:PORT at which ranks started by a scheduler meet; not needed under torchrun."""
