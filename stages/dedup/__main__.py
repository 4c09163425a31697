from stages.dedup.config import DedupConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("dedup", DedupConfig, "stages.dedup.run"))
