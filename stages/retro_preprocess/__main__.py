from stages.retro_preprocess.config import RetroPreprocessConfig
from stages.runtime.cli import stage_main

raise SystemExit(
    stage_main(
        "retro_preprocess", RetroPreprocessConfig, "stages.retro_preprocess.run", megatron=True
    )
)
