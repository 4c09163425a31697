from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "retro_embed", RetroEmbedConfig, "stages.retro_embed.run", "stages.retro_embed.inputs"
    )
)
