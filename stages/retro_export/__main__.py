from stages.retro_export.config import RetroExportConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("retro_export", RetroExportConfig, "stages.retro_export.run"))
