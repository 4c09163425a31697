from stages.blame.config import BlameConfig
from stages.runtime.cli import stage_main

raise SystemExit(stage_main("blame", BlameConfig, "stages.blame.run"))
