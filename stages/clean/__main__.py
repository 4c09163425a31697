from stages.clean.config import CleanConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("clean", CleanConfig, "stages.clean.run"))
