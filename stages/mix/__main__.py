from stages.mix.config import MixConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("mix", MixConfig, "stages.mix.run"))
