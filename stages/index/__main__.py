from stages.cli import stage_main
from stages.index.config import IndexConfig

raise SystemExit(stage_main("index", IndexConfig, "stages.index.run"))
