from stages.retro_import.config import RetroImportConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("retro_import", RetroImportConfig, "stages.retro_import.run"))
