from stages.runtime.cli import stage_main
from stages.score.config import ScoreConfig

raise SystemExit(stage_main("score", ScoreConfig, "stages.score.run", megatron=True))
