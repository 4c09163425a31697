from stages.retro_db.config import RetroDbConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("retro_db", RetroDbConfig, "stages.retro_db.run"))
