from stages.cli import stage_main
from stages.reshard.config import ReshardConfig

raise SystemExit(stage_main("reshard", ReshardConfig, "stages.reshard.run"))
