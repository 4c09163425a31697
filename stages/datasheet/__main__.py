from stages.datasheet.config import DatasheetConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("datasheet", DatasheetConfig, "stages.datasheet.run"))
