from stages.cli import stage_main
from stages.evaluate.config import EvaluateConfig

raise SystemExit(
    stage_main("evaluate", EvaluateConfig, "stages.evaluate.run", "stages.evaluate.inputs")
)
