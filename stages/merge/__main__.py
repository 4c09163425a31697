from stages.merge.config import MergeConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("merge", MergeConfig, "stages.merge.run", megatron=True))
