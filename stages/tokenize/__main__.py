from stages.runtime.cli import stage_main
from stages.tokenize.config import TokenizeConfig

raise SystemExit(stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", megatron=True))
