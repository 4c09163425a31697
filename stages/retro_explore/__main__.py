from stages.retro_explore.config import RetroExploreConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "retro_explore", RetroExploreConfig, "stages.retro_explore.run", positional="project"
    )
)
