from stages.index.config import IndexConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("index", IndexConfig, "stages.index.run"))
