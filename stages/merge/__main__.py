from stages.cli import stage_main
from stages.merge.config import MergeConfig

raise SystemExit(stage_main("merge", MergeConfig, "stages.merge.run"))
